"""Export PyTorch models to ONNX with the exact module call on every node."""

__version__ = "0.1.0"
