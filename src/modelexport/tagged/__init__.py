"""A tagged file as a value: read, shown, compared; encodings and documents."""
