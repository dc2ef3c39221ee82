"""ONNX Runtime: sessions, providers, random inputs."""
