"""Two files compared: their structure, and what they compute by module."""
