"""Scripts of findings, for torchrun."""
