"""Translations of operators that ``torch.onnx`` has none for, or a wrong one: rules on operators."""
