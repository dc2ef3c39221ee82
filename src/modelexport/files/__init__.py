"""Files: sets written atomically, ONNX, safetensors and checkpoints, one tensor at a time."""
