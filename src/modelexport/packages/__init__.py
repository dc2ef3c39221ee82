"""Models of several graphs: generation, pipelines, images and sound; `packaging.py` is the page to read first."""
