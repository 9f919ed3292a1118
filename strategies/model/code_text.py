"""Values as Python text, for scripts that show a finding without an import of ours."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from localtensor.layout import rounds, scale_of


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


def slack_text(want: Any, slack: Tensor | None) -> str:
    """How far a result may be off: the largest finite slack, and a little of its scale; elements that jump do not count."""
    finite = [v for v in slack.flatten().tolist() if math.isfinite(v)] if isinstance(slack, Tensor) else []
    real = isinstance(want, Tensor) and rounds(want)
    return f"{max([*finite, 1e-9 * float(scale_of(want)) if real else 0.0]):.3g}"
