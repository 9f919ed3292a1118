"""Whether what the ranks hold is what a spec says of a tensor: `split(x, spec)`, but for partial values.

There are many ways to split a sum: the ranks of partial axes are folded first, and what they make together is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from localtensor.layout.partials import fold
from localtensor.layout.shards import local_shapes, split
from localtensor.layout.spec import Spec


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong, and on which ranks; nothing where `text` is empty."""

    text: str = ""
    ranks: tuple[int, ...] = ()


def compared(held: Sequence[Tensor], want: Tensor, spec: Spec) -> Wrong:
    """What is wrong with the pieces of a tensor that lies as the spec says."""
    shapes = local_shapes(spec)
    bad = [rank for rank, (piece, shape) in enumerate(zip(held, shapes, strict=True)) if tuple(piece.shape) != shape]
    if bad:
        return Wrong(f"rank {bad[0]} holds shape {tuple(held[bad[0]].shape)}, not {shapes[bad[0]]}", tuple(bad))
    bad = [rank for rank, piece in enumerate(held) if piece.dtype != want.dtype]
    if bad:
        return Wrong(f"rank {bad[0]} holds {held[bad[0]].dtype}, not {want.dtype}", tuple(bad))
    whole = folded(held, spec)
    plain = replace(spec, placements=tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements))
    room = slack([*held, want])
    wanted = split(want, plain)
    bad = [rank for rank, (got, ask) in enumerate(zip(whole, wanted, strict=True)) if not _alike(got, ask, room)]
    if not bad:
        return Wrong()
    return Wrong(_first(whole[bad[0]], wanted[bad[0]], room, bad[0]), tuple(bad))


def folded(held: Sequence[Tensor], spec: Spec) -> list[Tensor]:
    """For each rank, what the ranks that differ from it on partial axes alone hold together."""
    level = list(held)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Partial):
            after = list(level)
            for group in spec.mesh.groups(spec.mesh.names[axis]):
                total = fold(torch.stack([level[rank] for rank in group]), placement.reduce_op)
                for rank in group:
                    after[rank] = total
            level = after
    return level


def slack(pieces: Sequence[Tensor]) -> float:
    """How far sums of such pieces may be off: rounding of their largest element; 0 for what is exact."""
    if not (pieces[0].dtype.is_floating_point or pieces[0].dtype.is_complex):
        return 0.0
    largest = max((float(piece.abs().max()) for piece in pieces if piece.numel()), default=0.0)
    return 256 * torch.finfo(pieces[0].dtype).eps * max(largest, 1.0)


def _alike(got: Tensor, want: Tensor, room: float) -> bool:
    return bool(_close(got, want, room).all())


def _close(got: Tensor, want: Tensor, room: float) -> Tensor:
    return (got == want) if room == 0.0 else (got == want) | ((got - want).abs() <= room)


def _first(got: Tensor, want: Tensor, room: float, rank: int) -> str:
    wrong = ~_close(got, want, room)
    place = tuple(wrong.nonzero()[0].tolist())
    rows = sorted({int(where[0]) for where in wrong.nonzero()}) if got.ndim else []
    which = f"; wrong in its rows {', '.join(map(str, rows))}" if rows else ""
    return f"rank {rank} holds {got[place].item():.6g} at {list(place)}, not {want[place].item():.6g}{which}"
