"""Parts of the scripts that show a finding: Python text that needs torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import StridedShard
from strategies.torch_api.mesh_and_caches import divided


def head(shown: str, wrong: str, ranks: int, name: str, prints: str) -> str:
    """The docstring of a script: what it is about, what is wrong in this torch, and how to run it."""
    return f'''"""{shown}

DTensor in torch {torch.__version__.split("+")[0]}{wrong}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints {prints}
"""'''


def literal(x: Tensor) -> str:
    """Python text that makes the same tensor, to the last bit; strides of a dense layout included."""
    if x.is_complex():  # Python's own way to write a complex number loses the sign of a zero, and nan
        return f"torch.complex({literal(x.detach().real.clone())}, {literal(x.detach().imag.clone())})"
    made = f"torch.tensor({x.detach().cpu().tolist()!r}, dtype={x.dtype})"
    if x.numel() == 0:
        made = f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    if not x.is_contiguous():
        made = f"torch.empty_strided({tuple(x.shape)}, {tuple(x.stride())}, dtype={x.dtype}).copy_({made})"
    return made


def placements_code(placements: Sequence[Placement]) -> str:
    """Python text that makes a list of these.

    >>> placements_code([Shard(1), Partial("max")])
    "[Shard(1), Partial('max')]"
    """
    return f"[{', '.join(map(_placement, placements))}]"


def _placement(placement: Placement) -> str:
    if isinstance(placement, StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Partial):
        return f"Partial({placement.reduce_op!r})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


def flatten_code(names: Sequence[str], every: Sequence[str]) -> str:
    """Makes the flattened submesh of these axes of `mesh`, which has all of `every`."""
    part = "mesh" if tuple(names) == tuple(every) else f"mesh[{tuple(names)!r}]"
    return f'{part}._flatten("{"_".join(names)}")\n'


def averages_code() -> str:
    """gloo has no average: there it is a sum that is divided."""
    return f"""
{inspect.getsource(divided)}

for each in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"):  # gloo has no average
    if hasattr(functional, each):
        own = inspect.unwrap(getattr(functional, each))
        setattr(functional, each, functools.update_wrapper(functools.partial(divided, own), own))
"""
