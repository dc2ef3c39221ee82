"""What a run computed, value by value, and whether two arrays are equal; tolerances are here."""
