"""``internals``: what PyTorch's own ONNX exporters record of a model's modules, stage by stage."""
