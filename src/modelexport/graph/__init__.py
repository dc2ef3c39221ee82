"""Graphs of `onnx_ir`: walking, naming, boundaries, the owners of nodes."""
