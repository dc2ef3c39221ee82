"""The JSON documents beside a model, one file for each, and their reader."""
