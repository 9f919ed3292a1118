"""Parts of the scripts that show a finding: Python text that needs torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from strategies.model.code_text import placement_code
from strategies.torch_api.mesh_and_caches import divided


def head(shown: str, wrong: str, ranks: int, name: str, prints: str) -> str:
    """The docstring of a script: what it is about, what is wrong in this torch, and how to run it."""
    return f'''"""{shown}

DTensor in torch {torch.__version__.split("+")[0]}{wrong}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints {prints}
"""'''


def placements_code(placements: Sequence[Placement]) -> str:
    """Python text that makes a list of these.

    >>> from torch.distributed.tensor import Partial, Shard
    >>> placements_code([Shard(1), Partial("max")])
    "[Shard(1), Partial('max')]"
    """
    return f"[{', '.join(map(placement_code, placements))}]"


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
