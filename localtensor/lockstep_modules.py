"""torch.nn and the libraries above it in lockstep: where they hold a tensor in a way that a LocalTensor does not bear."""

from __future__ import annotations

from typing import Any

import torch

from localtensor.tensor import LocalTensor

_installed: list[bool] = []


def install() -> None:
    """They treat LocalTensors as they have to be treated, from now on; any other tensor as before."""
    if _installed:
        return
    _installed.append(True)
    original = torch.utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        _swap(original, t1, t2)

    swap_tensors.__doc__ = original.__doc__
    torch.utils.swap_tensors = swap_tensors


def _swap(original: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    """Two tensors are each other, as `Module.to` makes them: torch takes none that others refer to weakly.

    A memory does, to know its views.
    """
    ours = [x for x in (one, other) if isinstance(x, LocalTensor) and x._memory is not None]
    for x in ours:
        x._memory.leave(x)  # type: ignore[union-attr]
    try:
        original(one, other)
    finally:
        for x in (one, other) if ours else ():
            memory = x.__dict__.get("_memory")
            if memory is not None:
                x._memory = None  # type: ignore[attr-defined]
                memory.join(x)
