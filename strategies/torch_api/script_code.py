"""Code generators for the scripts that reproduce a finding: Python text that needs torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from strategies.model.code_text import placement_code
from strategies.torch_api.mesh_and_caches import divided


def docstring_code(shown: str, wrong: str, ranks: int, name: str, prints: str) -> str:
    """The docstring of a script: its subject, what is wrong with it in this torch, and how to run it."""
    return f'''"""{shown}

DTensor in torch {torch.__version__.split("+")[0]}{wrong}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints {prints}
"""'''


def placements_code(placements: Sequence[Placement]) -> str:
    """Python text of a list of these placements.

    >>> from torch.distributed.tensor import Partial, Shard
    >>> placements_code([Shard(1), Partial("max")])
    "[Shard(1), Partial('max')]"
    """
    return f"[{', '.join(map(placement_code, placements))}]"


def flatten_code(names: Sequence[str], every: Sequence[str]) -> str:
    """Python text that flattens these axes of `mesh`, whose axes are `every`."""
    part = "mesh" if tuple(names) == tuple(every) else f"mesh[{tuple(names)!r}]"
    return f'{part}._flatten("{"_".join(names)}")\n'


def averages_code() -> str:
    """Python text that replaces DTensor's averages, which gloo does not have, by sums that are divided."""
    return f"""
{inspect.getsource(divided)}

for each in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"):  # gloo has no average
    if hasattr(functional, each):
        own = inspect.unwrap(getattr(functional, each))
        setattr(functional, each, functools.update_wrapper(functools.partial(divided, own), own))
"""
