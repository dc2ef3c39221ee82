"""ONNX Runtime: sessions, providers, random inputs."""

CPU = "CPUExecutionProvider"
"""The name of the provider for this processor."""
