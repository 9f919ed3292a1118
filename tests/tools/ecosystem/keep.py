"""What a program of this folder leaves for the comparison: one file a rank."""

import os
from pathlib import Path

import torch


def keep(**values):
    """Save what this rank computed, if the tool asks for it: tensors, numbers, texts, and lists and dicts of them."""
    if folder := os.environ.get("ECOSYSTEM_KEEP"):
        torch.save(_plain(values), Path(folder) / f"rank{os.environ['RANK']}.pt")


def parameters(module):
    """The parameters and buffers of a module, by name; of a DTensor, its local part."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().clone().as_subclass(torch.Tensor) if type(local) is torch.nn.Parameter else local.detach()
    return value.item() if hasattr(value, "item") else value
