"""Models that generate text: the parts that ``generate`` runs, their state, and loops over them."""
