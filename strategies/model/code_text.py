"""Values as Python text, for scripts that reproduce a finding without importing this package."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import StridedShard, is_inexact, max_abs

FLATTEN_FUNCTION = '''def flat(out):
    """All results of an op, in one list."""
    return [leaf for item in out for leaf in flat(item)] if isinstance(out, (tuple, list)) else [out]
'''
"""The function of a script that flattens the results of an op."""
COMPARISON_CODE = """\
        same = (got.shape, got.dtype) == (want.shape, want.dtype) and torch.allclose(got, want, rtol=0.0, atol=slack, equal_nan=True)
        want, got = want.tolist(), got.tolist()
    elif isinstance(want, (bool, int, float)):
        same = got == want
    else:
        continue
    wrong |= not same
    print(f"rank {{rank}} got  {{got}}\\nrank {{rank}} want {{want}}\\nrank {{rank}} {{'right' if same else 'WRONG'}}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
"""
"""The end of a script once `got` is gathered: it compares, prints both, and sets the exit code."""


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


def tensor_text(x: object, most: int = 24) -> str:
    """A tensor in one line: `[1, 2, ...] of shape (2, 4)`."""
    if not isinstance(x, Tensor):
        return repr(x)
    flat = [f"{v:.6g}" if not isinstance(v, bool) else str(v) for v in x.detach().flatten()[:most].tolist()]
    return f"[{', '.join(flat)}{', ...' if x.numel() > most else ''}] of shape {tuple(x.shape)}"


def placement_code(placement: Placement) -> str:
    """Python text of the placement, for a follower and for a script."""
    if isinstance(placement, StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Partial):
        return f"Partial({placement.reduce_op!r})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"
