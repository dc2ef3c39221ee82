"""Models of several graphs: generation, pipelines, images and sound; `package_export.py` is the page to read first."""
