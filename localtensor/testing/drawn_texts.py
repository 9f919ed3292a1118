"""A spec as one line of text, with the sizes of its mesh, and read back: `f32[5,3] @ dp=2:S(0), tp=4:R`."""

from __future__ import annotations

import re

from localtensor.mesh import Mesh
from localtensor.placement import Spec, parse, shape_text, short
from localtensor.testing.drawn_checks import DTYPES, BadDraw

_WHOLE = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\] @ (.+)")
_AXIS = re.compile(r"([^\W\d]\w*)=(\d+):(\w+(?:\([^)]*\))?)(?:, (?=.)|$)")
_DTYPE = {shape_text((), dtype).partition("[")[0]: dtype for dtype in DTYPES}


def spec_text(spec: Spec) -> str:
    """The line that `read_spec` reads.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> spec_text(Spec(Mesh.of(dp=2, tp=4), (Shard(0), Replicate()), (5, 3), torch.float32))
    'f32[5,3] @ dp=2:S(0), tp=4:R'
    """
    axes = zip(spec.mesh.names, spec.mesh.sizes, spec.placements, strict=True)
    placed = ", ".join(f"{name}={size}:{short(placement)}" for name, size, placement in axes)
    return f"{shape_text(spec.shape, spec.dtype)} @ {placed}"


def read_spec(text: str) -> Spec:
    """The spec that a line stands for.

    Raises `BadDraw` for anything else, and what `Mesh`, `parse` and `Spec` raise.

    >>> read_spec("bf16[7] @ a=3:SS(0,2)")
    bf16[7] @ a:SS(0,2)
    """
    whole = _WHOLE.fullmatch(text) if isinstance(text, str) else None
    axes = list(_AXIS.finditer(whole[3])) if whole else []
    if whole is None or "".join(axis[0] for axis in axes) != whole[3] or whole[1] not in _DTYPE:
        remedy = "Write it as 'f32[5,3] @ dp=2:S(0), tp=4:R'."
        raise BadDraw("read_spec", "text", text, "this is no spec", remedy)
    mesh = Mesh(tuple(int(axis[2]) for axis in axes), tuple(axis[1] for axis in axes))
    shape = tuple(int(size) for size in whole[2].split(",") if size)
    return Spec(mesh, tuple(parse(axis[3]) for axis in axes), shape, _DTYPE[whole[1]])
