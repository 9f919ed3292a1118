"""Patches of torch.distributed, DeviceMesh, DTensor and torch.nn for the mode."""
