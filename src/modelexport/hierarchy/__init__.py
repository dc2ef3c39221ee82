"""What a model consists of (static), what a run of it calls (traced), and how the two differ (compare)."""
