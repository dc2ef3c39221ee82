"""Front ends: turn a module and its inputs into an unoptimized ONNX graph whose nodes know their calls."""
