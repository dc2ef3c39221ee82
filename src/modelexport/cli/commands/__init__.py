"""The commands, in files by what they do. Each parses, calls and shows; slow imports wait until it runs."""
