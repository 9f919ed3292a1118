"""Communication must be written: `with no_implicit_communication():` refuses an op that would communicate by itself.

    with no_implicit_communication():
        y = x @ w                       # raises ImplicitCommunication if x or w had to move, before anything moves
        y = y.redistribute(mesh, [Shard(0)])    # what is written is allowed

What is refused: an op of DTensor, or of `overlay_dtensor`, whose tensors would be redistributed in a way that
communicates, forward and backward; the gradient of `DTensor.from_local`, where it comes in other placements; a handler
of DTensor's that calls collectives (`argmax`, convolution, `loss_parallel`, gradient scaling); `torch.equal`, which
all-reduces its answer.  What is allowed: `redistribute`, `full_tensor`, `distribute_tensor` and their backwards,
collectives that the program calls; and, but for `strict`, changes that each rank makes by itself (R -> S).

Who sees it: the thread and the asyncio task that entered it; a backward inside (autograd's own threads are switched off);
the ranks of a `localtensor.run` that is called inside; a `LocalTensorMode`.  A rank of a program may enter one of its own.
Threads that are started inside, and real processes, do not see it.  All ranks of a mesh are refused alike, for specs
alone decide.  A rank outside of the mesh has nothing to redistribute, and is refused `torch.equal` only.

What it cannot see: communication that is in no op of DTensor (FSDP's own, hooks that call `redistribute`), the
state of random numbers that DTensor broadcasts once, at the first random op on a GPU, and graphs that are compiled.

| torch part                                                 | read on     | run on |
|------------------------------------------------------------|-------------|--------|
| torch.distributed.tensor._dtensor_spec.DTensorSpec: a name | 2.11 - 2.15 | 2.13   |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from localtensor._util import ambient
from localtensor.errors import Refusal
from strategies.propagation.explicit import handlers
from strategies.propagation.explicit.handlers import watched
from strategies.propagation.explicit.redistribution_text import (
    ImplicitCommunication,
    ImplicitCommunicationWarning,
    Need,
    communicating_steps,
    refused,
)
from strategies.propagation.model import Propagation
from strategies.torch_api.handler_table import Views

__all__ = [
    "ImplicitCommunication",
    "ImplicitCommunicationWarning",
    "allow_implicit_communication",
    "communicates",
    "no_implicit_communication",
]


def no_implicit_communication(*, strict: bool = False, warn: bool = False) -> Explicit:
    """A context manager, or a decorator: inside, an op that would communicate by itself raises `ImplicitCommunication`.

    `strict` refuses any redistribution of an op's tensors, also one that each rank makes by itself.  `warn` tells by an
    `ImplicitCommunicationWarning`, each op of each line once, and lets it be.  The same object may be entered again.

    >>> with no_implicit_communication():
    ...     torch.ones(2) + 1
    tensor([2., 2.])
    """
    return Explicit(strict=strict, warn=warn)


def allow_implicit_communication() -> Explicit:
    """A hole in `no_implicit_communication`: a context manager, or a decorator, inside of which all is as DTensor does it."""
    return Explicit(allows=True)


def communicates(propagation: Propagation) -> tuple[int, ...]:
    """The inputs of a propagated call, by leaf number, that would be communicated: nothing is run to know it.

    >>> from localtensor.layout.spec import Mesh
    >>> from localtensor.layout.spec import Spec, parse
    >>> from strategies.ops.all_rules import OUR_RULES
    >>> from strategies.propagation.propagator import Propagator
    >>> rows, columns = (Spec(Mesh.of(tp=2), (parse(p),), (4, 4), torch.float32) for p in ("S(0)", "S(1)"))
    >>> communicates(Propagator(OUR_RULES).propagate("aten.add.Tensor", [rows, columns]))
    (1,)
    """
    sizes = propagation.mesh.sizes
    return tuple(
        leaf
        for leaf, steps in enumerate(propagation.steps)
        if any(step.kind != "local" and sizes[step.axis] > 1 for step in steps)
    )


class NotDecorated(Refusal):
    """A decorator that would guard nothing: the body runs when the call is over."""

    def __init__(self, mode: Explicit, fn: Any, what: str) -> None:
        call, name = repr(mode), getattr(fn, "__qualname__", repr(fn))
        problem = f"it is a {what}, whose body does not run while it is called"
        super().__init__(call.partition("(")[0], "fn", name, problem, f"Write `with {call}:` in its body.")


class Explicit(contextlib.ContextDecorator):
    """What the two functions return: a context manager that may be entered again and again, by any thread.

    It decorates functions and coroutine functions.  Raises `NotDecorated` for a generator or a class.
    """

    def __init__(self, *, strict: bool = False, warn: bool = False, allows: bool = False) -> None:
        self.strict, self.warn, self.allows = strict, warn, allows
        self.told: set[tuple[str, str]] = set()

    def __enter__(self) -> Explicit:
        with contextlib.ExitStack() as undo:  # should any of it fail
            ambient.begin_guards(handlers.begin)
            undo.callback(ambient.end_guards, handlers.end)
            # a GPU's backward has a thread of its own
            ambient.hold_backward(lambda: torch.autograd.set_multithreading_enabled(False))
            ambient.put_guard(Guard(self, ambient.guard()))
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guard = ambient.guard()
        if guard is not None:
            ambient.put_guard(guard.without(self))
        ambient.release_backward()
        ambient.end_guards(handlers.end)

    def __call__(self, fn: Any) -> Any:
        if inspect.isclass(fn):
            raise NotDecorated(self, fn, "class")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise NotDecorated(self, fn, "generator")
        return self._awaited(fn) if inspect.iscoroutinefunction(fn) else super().__call__(fn)

    def _awaited(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await fn(*args, **kwargs)

        return inside

    def __repr__(self) -> str:
        if self.allows:
            return "allow_implicit_communication()"
        return f"no_implicit_communication(strict={self.strict}, warn={self.warn})"


class Guard:
    """One entry of an `Explicit` in one thread and task; `below` is the one that it was entered in."""

    def __init__(self, owner: Explicit, below: Guard | None, *, handlers: bool = True) -> None:
        self.owner, self.below, self.handlers = owner, below, handlers
        self.allows = owner.allows
        self._views = Views(functools.partial(watched, tell=self.tell))

    def asks(self, op: str, needs: Sequence[Need]) -> None:
        """Raises `ImplicitCommunication`, or warns, if one of these would communicate."""
        moving = [need for need in needs if self.moves(need.src, need.dst)]
        if moving:
            self.tell(refused(op, moving))

    def tell(self, error: ImplicitCommunication) -> None:
        if not self.owner.warn:
            raise error
        line = error.line
        key = error.op, str(line and (line.file, line.line))
        if key not in self.owner.told:
            self.owner.told.add(key)
            where = (line.file, line.line) if line else (__file__, 0)
            warnings.warn_explicit(str(error), ImplicitCommunicationWarning, *where)

    def over(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """DTensor's table of handlers as this thread sees it."""
        return table if self.allows or not self.handlers else self._views.of(table)

    def passing(self) -> Guard:
        """The same for a call that was told of already: its handler is torch's own."""
        return Guard(self.owner, self.below, handlers=False)

    def without(self, owner: Explicit) -> Guard | None:
        """The rest less the last entry of that owner, which as a rule is the topmost."""
        if self.owner is owner:
            return self.below
        return self if self.below is None else Guard(self.owner, self.below.without(owner))

    def moves(self, src: DTensorSpec, dst: DTensorSpec) -> bool:
        """Whether a tensor that is brought from one spec to another is what this guard refuses."""
        if self.allows:
            return False
        if self.owner.strict:
            return src.placements != dst.placements or src.shard_order != dst.shard_order
        return bool(communicating_steps(src, dst))
