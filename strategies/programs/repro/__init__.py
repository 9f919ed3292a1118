"""Scripts that reproduce findings under torchrun."""
