"""What commands share: their arguments and options, progress, and results as text and JSON."""
