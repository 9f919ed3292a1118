"""Python text of values and of parts of a script, for scripts that reproduce a finding with torch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import StridedShard, is_inexact, max_abs

FLATTEN_FUNCTION = '''def flat(out):
    """All results of an op, in one list; none of an op that returns nothing."""
    if isinstance(out, (tuple, list)):
        return [leaf for item in out for leaf in ([item] if item is None else flat(item))]
    return [] if out is None else [out]
'''
"""The function of a script that flattens the results of an op."""
COMPARISON_FUNCTION = '''def differs(got, want, atol):
    """Whether what DTensor gives is not what is right, in the ranks' pieces or as a whole.  It prints both; all ranks call it."""
    rank, placements = dist.get_rank(), getattr(got, "placements", None)
    if placements is not None:
        print(f"rank {rank} placements {placements}", flush=True)
    if isinstance(got, DTensor) and isinstance(want, torch.Tensor):
        layout, apart = [Replicate() if p.is_partial() else p for p in placements], False
        if all(type(p) is Replicate or (type(p) is Shard and p.dim < want.ndim) for p in layout):
            held, right = got.to_local(), distribute_tensor(want, got.device_mesh, layout, src_data_rank=None).to_local()
            apart = held.shape != right.shape
            if apart:
                print(f"rank {rank} holds shape {tuple(held.shape)}, its piece of {tuple(want.shape)} has {tuple(right.shape)}", flush=True)
        wrong_pieces = torch.tensor([float(apart)])
        dist.all_reduce(wrong_pieces)
        if wrong_pieces.item():
            print(f"rank {rank} WRONG", flush=True)
            return True
        got = got.full_tensor()
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        same = (got.shape, got.dtype) == (want.shape, want.dtype) and torch.allclose(got, want, rtol=0.0, atol=atol, equal_nan=True)
        want, got = want.tolist(), got.tolist()
    else:
        same = type(got) is type(want) and (got == want or got != got and want != want)
    print(f"rank {rank} got  {got}\\nrank {rank} want {want}\\nrank {rank} {'right' if same else 'WRONG'}", flush=True)
    return not same
'''
"""The function of a script that compares a result of DTensor with the right one, as `Confirmation` does."""
END_CODE = """\
dist.barrier()
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
"""
"""The end of a script, which sets the exit code."""


def docstring_code(shown: str, wrong: str, ranks: int, name: str, prints: str) -> str:
    """The docstring of a script: its subject, what is wrong with it in this torch, and how to run it."""
    return f'''"""{shown}

DTensor in torch {torch.__version__.split("+")[0]}{wrong}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints {prints}
"""'''


def tensor_literal(x: Tensor) -> str:
    """Python text of a bitwise equal tensor, with the strides of a dense layout."""
    if x.is_complex():  # the repr of a Python complex number loses the sign of a zero, and nan
        return f"torch.complex({tensor_literal(x.detach().real.clone())}, {tensor_literal(x.detach().imag.clone())})"
    made = f"torch.tensor({x.detach().cpu().tolist()!r}, dtype={x.dtype})"
    if x.numel() == 0:
        made = f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    if not x.is_contiguous():
        made = f"torch.empty_strided({tuple(x.shape)}, {tuple(x.stride())}, dtype={x.dtype}).copy_({made})"
    return made


def slack_text(want: object, slack: Tensor | None) -> str:
    """The tolerance as text: the largest finite slack, and at least 1e-9 of the result's scale; unstable elements are ignored."""
    finite = [v for v in slack.flatten().tolist() if math.isfinite(v)] if isinstance(slack, Tensor) else []
    size = float(max_abs(want)) if isinstance(want, Tensor) and is_inexact(want) else 0.0
    return f"{max([*finite, 1e-9 * size]):.3g}"


def placement_code(placement: Placement) -> str:
    """Python text of the placement, for a follower and for a script."""
    if isinstance(placement, StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Partial):
        return f"Partial({placement.reduce_op!r})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


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
