"""A spec as one line of text, with the sizes of its mesh, and read back: `f32[5,3] @ dp=2:S(0), tp=4:R`.

Where the axes do not cut a dim from left to right, each has its turn: `f32[8] @ dp=2:S(0)[1], tp=2:S(0)[0]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import ShardOrder, Spec, cuts, parse, shape_text, short
from localtensor.testing.hypothesis_strategies.checks import DTYPES, BadDraw

_WHOLE = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\] @ (.+)")
_AXIS = re.compile(r"([^\W\d]\w*)=(\d+):(\w+(?:\([^)]*\))?)(?:\[(\d+)\])?(?:, (?=.)|$)")
_DTYPE = {shape_text((), dtype).partition("[")[0]: dtype for dtype in DTYPES}


def spec_text(spec: Spec) -> str:
    """The line that `read_spec` reads.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> spec_text(Spec(Mesh.of(dp=2, tp=4), (Shard(0), Replicate()), (5, 3), torch.float32))
    'f32[5,3] @ dp=2:S(0), tp=4:R'
    """
    turns = {axis: f"[{turn}]" for _, axes in spec.shard_order for turn, axis in enumerate(axes)}
    axes = enumerate(zip(spec.mesh.names, spec.mesh.sizes, spec.placements, strict=True))
    placed = ", ".join(f"{name}={size}:{short(placed)}{turns.get(axis, '')}" for axis, (name, size, placed) in axes)
    return f"{shape_text(spec.shape, spec.dtype)} @ {placed}"


def read_spec(text: str) -> Spec:
    """The spec that a line stands for.

    Raises `BadDraw` for anything else, and what `Mesh`, `parse` and `Spec` raise.  Of a dim either no axis has a turn,
    or each that cuts it has its own, from 0 up.

    >>> read_spec("bf16[7] @ a=3:SS(0,2)"), read_spec("bf16[7] @ a=3:S(0)[1], b=2:S(0)[0]").shard_order
    (bf16[7] @ a:SS(0,2), ((0, (1, 0)),))
    """
    whole = _WHOLE.fullmatch(text) if isinstance(text, str) else None
    axes = list(_AXIS.finditer(whole[3])) if whole else []
    if whole is None or "".join(axis[0] for axis in axes) != whole[3] or whole[1] not in _DTYPE:
        remedy = "Write it as 'f32[5,3] @ dp=2:S(0), tp=4:R'."
        raise BadDraw("read_spec", "text", text, "this is no spec", remedy)
    mesh = Mesh(tuple(int(axis[2]) for axis in axes), tuple(axis[1] for axis in axes))
    shape = tuple(int(size) for size in whole[2].split(",") if size)
    placements = tuple(parse(axis[3]) for axis in axes)
    order = _order(text, placements, [None if axis[4] is None else int(axis[4]) for axis in axes])
    return Spec(mesh, placements, shape, _DTYPE[whole[1]], order)


def _order(text: str, placements: Sequence[Placement], turns: Sequence[int | None]) -> ShardOrder:
    """The shard order that the turns of the axes make."""
    found: dict[int | None, list[tuple[int | None, int]]] = {}
    for axis, (cut, turn) in enumerate(zip(map(cuts, placements), turns, strict=True)):
        found.setdefault(None if cut is None else cut[0], []).append((turn, axis))
    orders = []
    for dim, taken in found.items():
        given = {turn: axis for turn, axis in taken if turn is not None}
        if given and (dim is None or sorted(given) != list(range(len(taken)))):
            problem = "these turns do not say in which order the axes cut a dim"
            remedy = "Number all axes that cut the dim from 0 up, as in 'f32[8] @ dp=2:S(0)[1], tp=2:S(0)[0]'."
            raise BadDraw("read_spec", "text", text, problem, remedy)
        if given and dim is not None:
            orders.append((dim, tuple(given[turn] for turn in sorted(given))))
    return tuple(orders)
