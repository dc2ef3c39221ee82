"""The file format: keys, documents and their schemas, how calls and tags are written."""
