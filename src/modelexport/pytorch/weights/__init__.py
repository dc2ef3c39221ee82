"""Weights of a model in PyTorch: left in their files, quantized as a checkpoint has them, changed for a comparison."""
