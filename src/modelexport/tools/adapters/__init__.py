"""LoRA adapters and new weights in files and packages."""
