"""Dropout in a comparison: nothing is dropped, and what each rank would drop is drawn and compared.

With dropout off, values can be compared.  The numbers are drawn all the same, from the generator of the program, so that
streams go on as they would.  Ranks that hold the same activation have to drop the same elements of it: the program promises
equal streams there.  A module that activation checkpointing computes again has to drop what it dropped before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor._util.patching import replaced
from localtensor.errors.runs import RanksDiverge

LEAST_TELLING = 64
"""Elements from which on equal masks are no accident."""
ATTENTION = "scaled_dot_product_attention"
_DROPOUTS = [
    f"{kind}{tail}"
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for tail in ("", "_")
]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A call that would have dropped: the function, "" for a module's own; the probability; what it would have kept; the line.

    `kept` has the shape of the rank's input, for an attention that of its weights; None where it was not drawn.
    """

    function: str
    p: float
    kept: Tensor | None
    place: Place | None = None


@dataclass
class Draws:
    """What one run draws for its dropouts; `others` says whether the program draws other numbers, too.

    `add` gets each call with its input, and says whether it is one of the forward pass.
    """

    add: Callable[[Tensor, Drawn], bool]
    others: bool = False
    _state: Tensor = field(default_factory=torch.get_rng_state)

    def draw(self, x: Tensor, function: str, p: float, shape: Sequence[int], original: Callable[..., Tensor]) -> None:
        """Draws what a call would have dropped of `x`, or of a tensor of this shape."""
        before = torch.get_rng_state()
        drawn = Drawn(function, p, _kept(x, p, shape, original), place_of_frame(sys._getframe(2)))
        if self.add(x, drawn):  # checkpointing sets the generator back for what it computes again
            self.others = self.others or _differ(before, self._state)
            self._state = torch.get_rng_state()

    def finish(self) -> None:
        """Looks whether other numbers were drawn at last."""
        self.others = self.others or _differ(torch.get_rng_state(), self._state)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two states of a generator differ; in lockstep, on any rank."""
    try:
        return not torch.equal(one, other)
    except RanksDiverge:
        return True


def _kept(x: Tensor, p: float, shape: Sequence[int], original: Callable[..., Tensor]) -> Tensor | None:
    """The elements that a call keeps; of a DTensor those of the rank's part.  What is dropped becomes 0, or less."""
    with torch.no_grad():
        if not isinstance(x, DTensor):
            return original(torch.ones(tuple(shape), dtype=x.dtype, device=x.device), p, True) > 0
        if tuple(shape) != tuple(x.shape) or any(isinstance(placement, Partial) for placement in x.placements):
            return None
        ones, stride = torch.ones_like(x.to_local()), x.stride()
        whole = DTensor.from_local(ones, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride)
        done: Any = original(whole, p, True)
        return done.to_local() > 0  # type: ignore[no-any-return]


class _Kept(torch.autograd.Function):
    """Gives its input, and saves a tensor, as a dropout does: so checkpointing has to compute it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors  # where a checkpoint has not saved it, this computes it again
        return grad


_CURRENT: ContextVar[Draws | None] = ContextVar("localtensor_dropouts", default=None)


@contextmanager
def drawing(add: Callable[[Tensor, Drawn], bool]) -> Iterator[Draws]:
    """Inside the block the dropouts of this thread are those of one run, whose `Draws` it gives."""
    draws = Draws(add)
    token = _CURRENT.set(draws)
    try:
        yield draws
    finally:
        _CURRENT.reset(token)
        draws.finish()


@contextmanager
def dropout_off() -> Iterator[None]:
    """Inside the block nothing is dropped; inside `drawing` it is drawn what would be.

    The functions are replaced where torch.nn.functional looks them up, also for modules: torch._VF.dropout and the like (torch
    2.11 to 2.15), and `scaled_dot_product_attention`.
    """
    functions = {name: getattr(torch._VF, name) for name in _DROPOUTS}

    def silenced(name: str) -> Callable[..., Tensor]:
        plain = name.removesuffix("_")
        original, drawn = functions[name], functions[plain]

        def call(x: Tensor, p: float, train: bool) -> Any:
            draws = _CURRENT.get()
            if not (p and train and draws is not None):
                return original(x, 0.0, train)
            draws.draw(x, plain, p, x.shape, drawn)
            return _Kept.apply(x) if x.requires_grad and torch.is_grad_enabled() else x

        return call

    attention, dropout = nn.functional.scaled_dot_product_attention, torch._VF.dropout

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        draws = _CURRENT.get()
        if dropout_p and draws is not None:
            draws.draw(q, ATTENTION, dropout_p, (*q.shape[:-1], k.shape[-2]), dropout)
        return attention(q, k, v, attn_mask, 0.0, *args, **options)

    with ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(replaced(torch._VF, name, silenced(name)))
        stack.enter_context(replaced(nn.functional, ATTENTION, attend))
        yield


def drops_otherwise(
    drawn: Sequence[Drawn], alone: Drawn, name: str, mesh: Sequence[tuple[str, int]], same: Sequence[int]
) -> str | None:
    """What is wrong with the ranks' draws for one call, in words; None if nothing is.

    `drawn` are those of the ranks in the order of the mesh, whose axes have these names and sizes; `alone` is that of the
    program called `name`; along the axes `same` ranks hold the same.

    >>> one, other = (Drawn("", 0.5, torch.tensor([kept, True])) for kept in (True, False))
    >>> drops_otherwise([one, other], one, "one device", [("tp", 2)], [0])
    'replicas along tp differ: ranks 0 and 1 hold the same, and drop different elements of it: the wrong seed'
    """
    for rank, one in enumerate(drawn):
        if one.p != alone.p:
            return f"rank {rank} drops with a probability of {one.p:g}, and {name} with one of {alone.p:g}"
    for axis, a, b in _pairs(len(drawn), [size for _, size in mesh], same):
        x, y = drawn[a].kept, drawn[b].kept
        if x is not None and y is not None and x.shape == y.shape and not torch.equal(x, y):
            what = "hold the same, and drop different elements of it: the wrong seed"
            return f"replicas along {mesh[axis][0]} differ: ranks {a} and {b} {what}"
    return None


def drop_alike(drawn: Sequence[Drawn], mesh: Sequence[tuple[str, int]], parts: Sequence[int]) -> list[str]:
    """The axes, of those along which ranks hold different parts, along which they drop the same elements."""
    found = []
    for at in parts:
        pairs = [(drawn[a].kept, drawn[b].kept) for _, a, b in _pairs(len(drawn), [n for _, n in mesh], [at])]
        told = all(x is not None and y is not None and x.numel() >= LEAST_TELLING for x, y in pairs)
        if pairs and told and all(x is not None and y is not None and torch.equal(x, y) for x, y in pairs):
            found.append(mesh[at][0])
    return found


def _pairs(count: int, sizes: Sequence[int], axes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The axis and two ranks that differ along it only, the first of them at its start."""
    ranks = torch.arange(count).reshape(tuple(sizes))
    for axis in axes:
        for row in ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist():
            yield from ((axis, row[0], other) for other in row[1:])


def drawn_again(forward: Sequence[Drawn], again: Sequence[Drawn]) -> Drawn | None:
    """The first call that was computed again, and would have dropped other elements than it did in the forward pass."""
    for one in again:
        same = [x.kept for x in forward if x.place == one.place and x.kept is not None and x.p == one.p]
        alike = [x for x in same if one.kept is not None and x.shape == one.kept.shape]
        if one.kept is not None and alike and not any(torch.equal(x, one.kept) for x in alike):
            return one
    return None
