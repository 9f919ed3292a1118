"""`with no_implicit_communication():` refuses ops that would communicate without a call for it in the program.

    with no_implicit_communication():
        y = x @ w                       # raises ImplicitCommunication if x or w must move, before anything moves
        y = y.redistribute(mesh, [Shard(0)])    # explicit: allowed

Refused are: an op of DTensor, or of `overlay_dtensor`, whose tensors would be redistributed with communication, forward
and backward; the gradient of `DTensor.from_local`, if it comes in other placements; a handler of DTensor's that calls
collectives (`argmax`, convolution, `loss_parallel`, gradient scaling); `torch.equal`, which all-reduces its result.
Allowed are: `redistribute`, `full_tensor`, `distribute_tensor` and their backwards; collectives that the program calls;
and, without `strict`, redistributions that each rank makes locally (R -> S).

The context applies to the thread and the asyncio task that entered it; to a backward inside (autograd's own threads are
switched off); to the ranks of a `localtensor.run` that is called inside; to a `LocalTensorMode`.  A rank of a program
may enter one of its own.  It does not apply to threads that are started inside, nor to real processes.  The decision
depends on specs alone, so all ranks of a mesh are refused alike.  A rank outside of the mesh has nothing to
redistribute, and is refused `torch.equal` only.

It does not detect communication outside of DTensor's ops (FSDP's own, hooks that call `redistribute`), the random state
that DTensor broadcasts at the first random op on a GPU, and communication in compiled graphs.

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
from typing import Any, TypeVar

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from localtensor._util import ambient
from localtensor.errors import Refusal
from strategies.propagation.explicit import handlers
from strategies.propagation.explicit.handlers import watched_table
from strategies.propagation.explicit.redistribution_text import (
    ImplicitCommunication,
    ImplicitCommunicationWarning,
    ImplicitRedistribution,
    communicating_steps,
    implicit_communication_error,
)
from strategies.propagation.mesh_expansion import Propagation
from strategies.torch_api.handler_table import HandlerTableViews

__all__ = [
    "ImplicitCommunication",
    "ImplicitCommunicationWarning",
    "allow_implicit_communication",
    "communicates",
    "no_implicit_communication",
]
F = TypeVar("F", bound=Callable[..., Any])


def no_implicit_communication(*, strict: bool = False, warn: bool = False) -> ExplicitCommunication:
    """A context manager, or a decorator: inside, an op that would communicate implicitly raises `ImplicitCommunication`.

    `strict` refuses any redistribution of an op's tensors, also a local one.  `warn` issues an
    `ImplicitCommunicationWarning` instead, once for each op on each line.  The same object may be entered again.

    >>> with no_implicit_communication():
    ...     torch.ones(2) + 1
    tensor([2., 2.])
    """
    return ExplicitCommunication(strict=strict, warn=warn)


def allow_implicit_communication() -> ExplicitCommunication:
    """A context manager, or a decorator: inside, an enclosing `no_implicit_communication` does not apply."""
    return ExplicitCommunication(allows=True)


def communicates(propagation: Propagation) -> tuple[int, ...]:
    """The inputs of a propagated call, by leaf number, whose redistribution communicates.  Nothing is run.

    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import Spec, parse
    >>> from strategies.ops.all_rules import OUR_RULES
    >>> from strategies.propagation.propagator import Propagator
    >>> rows, columns = (Spec(Mesh.of(tp=2), (parse(p),), (4, 4), torch.float32) for p in ("S(0)", "S(1)"))
    >>> communicates(Propagator(OUR_RULES).propagate("aten.add.Tensor", [rows, columns]))
    (1,)
    """
    sizes = propagation.mesh.sizes
    moving = (any(step.kind != "local" and sizes[step.axis] > 1 for step in steps) for steps in propagation.steps)
    return tuple(leaf for leaf, moves in enumerate(moving) if moves)


class NotDecorated(Refusal):
    """A decorator that would have no effect: the body runs after the call has returned."""

    def __init__(self, mode: ExplicitCommunication, fn: object, what: str) -> None:
        call, name = repr(mode), getattr(fn, "__qualname__", repr(fn))
        problem = f"it is a {what}, whose body does not run while it is called"
        super().__init__(call.partition("(")[0], "fn", name, problem, f"Write `with {call}:` in its body.")


class ExplicitCommunication(contextlib.ContextDecorator):
    """The reentrant context manager of the two functions above.  Thread-safe.

    It decorates functions and coroutine functions.  Raises `NotDecorated` for a generator or a class.
    """

    def __init__(self, *, strict: bool = False, warn: bool = False, allows: bool = False) -> None:
        self.strict, self.warn, self.allows = strict, warn, allows
        self.warned: set[tuple[str, str]] = set()

    def __enter__(self) -> ExplicitCommunication:
        with contextlib.ExitStack() as undo:  # if a step fails
            ambient.begin_guards(handlers.install_hooks)
            undo.callback(ambient.end_guards, handlers.remove_hooks)
            # a GPU's backward has a thread of its own
            ambient.hold_backward(lambda: torch.autograd.set_multithreading_enabled(False))
            ambient.set_guard(Guard(self, ambient.guard()))
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        guard = ambient.guard()
        if guard is not None:
            ambient.set_guard(guard.without(self))
        ambient.release_backward()
        ambient.end_guards(handlers.remove_hooks)

    def __call__(self, fn: F) -> F:
        if inspect.isclass(fn):
            raise NotDecorated(self, fn, "class")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise NotDecorated(self, fn, "generator")
        if not inspect.iscoroutinefunction(fn):
            return super().__call__(fn)

        @functools.wraps(fn)
        async def inside(*args: object, **kwargs: object) -> object:
            with self:
                return await fn(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __repr__(self) -> str:
        if self.allows:
            return "allow_implicit_communication()"
        return f"no_implicit_communication(strict={self.strict}, warn={self.warn})"


class Guard:
    """One entry of an `ExplicitCommunication` in one thread and task; `below` is the enclosing one."""

    def __init__(self, owner: ExplicitCommunication, below: Guard | None, *, handlers: bool = True) -> None:
        self.owner, self.below, self.handlers = owner, below, handlers
        self.allows = owner.allows
        self._views = HandlerTableViews(functools.partial(watched_table, report=self.report))

    def check(self, op: str, needs: Sequence[ImplicitRedistribution]) -> None:
        """Raise `ImplicitCommunication`, or warn, if one of these redistributions is refused."""
        moving = [need for need in needs if self.moves(need.src, need.dst)]
        if moving:
            self.report(implicit_communication_error(op, moving))

    def report(self, error: ImplicitCommunication) -> None:
        """Raise the error, or warn with its message once for each op on each line."""
        if not self.owner.warn:
            raise error
        line = error.line
        key = error.op, str(line and (line.file, line.line))
        if key not in self.owner.warned:
            self.owner.warned.add(key)
            where = (line.file, line.line) if line else (__file__, 0)
            warnings.warn_explicit(str(error), ImplicitCommunicationWarning, *where)

    def over(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """DTensor's table of handlers as seen by this thread."""
        return table if self.allows or not self.handlers else self._views.of(table)

    def without_handlers(self) -> Guard:
        """The same for a call that was reported already: its handler is torch's own."""
        return Guard(self.owner, self.below, handlers=False)

    def without(self, owner: ExplicitCommunication) -> Guard | None:
        """The same without the innermost entry of that owner."""
        if self.owner is owner:
            return self.below
        return self if self.below is None else Guard(self.owner, self.below.without(owner))

    def moves(self, src: DTensorSpec, dst: DTensorSpec) -> bool:
        """Whether this guard refuses a redistribution from one spec to another."""
        if self.allows:
            return False
        if self.owner.strict:
            return src.placements != dst.placements or src.shard_order != dst.shard_order
        return bool(communicating_steps(src, dst))
