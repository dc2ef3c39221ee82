"""`internals`: what PyTorch's own exporters record about modules, stage by stage."""
