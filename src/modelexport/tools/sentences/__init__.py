"""Models of sentence-transformers: from tokens to embeddings in one graph."""
