"""What of torch.distributed, DeviceMesh, DTensor and torch.nn is patched under the mode."""
