"""Rules of our own in the running DTensor, for a while: `with overlay_dtensor():`.

    with overlay_dtensor():                   # our whole book
        y = distributed.cumsum(0)             # right, where DTensor's own rule is not

Inside, an op that the book has goes by the book's lines, expanded to the mesh by `strategies.propagation.mesh_expansion`; DTensor's own
lines for that op are not asked, its caches neither read nor filled.  Other ops go their own way.  Outside, all is as it
was, also after an exception.

Who sees it: the thread and asyncio task that entered it; a backward inside (it stays in that thread); the ranks of a
`localtensor.run` that is called inside; a `LocalTensorMode` inside.  A rank of a program may enter one of its own.
Threads that are started inside, and real processes, do not see it.  Where overlays are nested, the inner goes first.

What it cannot mend: DTensor's own redistribution (`full_tensor`, `redistribute`), which is no op and has no rule; ops that
torch takes apart before DTensor sees them, but for what they are taken apart into; ops that the book has not.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable
from types import TracebackType

import torch

from localtensor._util import ambient as _context
from localtensor.errors import LocalTensorError, refusal
from strategies.model.rule import overload
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.rule_checks import fault_of
from strategies.ops.semantics.rulebook import Book, Entry
from strategies.propagation.overlay import call as overlay_call
from strategies.propagation.overlay.call_plan import CallPlanner
from strategies.torch_api import dtensor as torch_dtensor
from strategies.torch_api import handler_table as overlay_table


class BadOverlay(LocalTensorError):
    """Rules that cannot be put over DTensor's, or names of none."""

    def __init__(self, argument: str, values: str, problem: str, remedy: str) -> None:
        super().__init__(refusal("overlay_dtensor", argument, values, problem, remedy))


def overlay_dtensor(
    book: Book | None = None, *, only: Iterable[object] | None = None, add: bool = True, replace: bool = True
) -> Overlay:
    """A context manager: inside, DTensor goes by the rules of `book`; without one, by `strategies.ops.OUR_RULES`.

    `only` names overloads, or globs of them: just those are taken from the book.  `add=False` leaves out what DTensor
    has no rule for, `replace=False` what it has.  The same object may be entered again, inside itself and in others'
    threads.

    Raises `BadOverlay` for what is no book, names an op or an argument that torch has not, or comes to no rule; and at
    use `strategies.ops.semantics.errors.BadRule`, with file and line, where a rule says nonsense.

    >>> from strategies.ops.semantics.rulebook import Book, rules
    >>> rows = rules("scans", "each column by itself", ["aten.cumsum.default"], lambda ask: [])
    >>> with overlay_dtensor(Book.of(*rows)) as there:
    ...     there.ops
    ('aten.cumsum.default',)
    """
    return Overlay(OUR_RULES if book is None else book, only=only, add=add, replace=replace)


class Overlay:
    """What `overlay_dtensor` returns: a context manager that may be entered again and again, by any thread."""

    def __init__(
        self, book: Book, *, only: Iterable[object] | None = None, add: bool = True, replace: bool = True
    ) -> None:
        if not isinstance(book, Book):
            raise BadOverlay(
                "book",
                repr(book),
                "this is no Book",
                "Make one: strategies.ops.semantics.rulebook.Book.of(*rules(...)).",
            )
        entries = [entry for entry in _among(book, only) if _wanted(overload(entry.op), add=add, replace=replace)]
        if not entries:
            raise BadOverlay("book", f"{len(book)} rules", "none of them is left", "Ask for more: only, add, replace.")
        planner = CallPlanner()
        self.entries = tuple(entries)
        self.handlers = {
            overload(entry.op): overlay_table.Ours(overlay_call.Runner(planner, entry)) for entry in entries
        }
        self.plans = planner

    @property
    def ops(self) -> tuple[str, ...]:
        """The overloads that go by our rules inside, in the book's order."""
        return tuple(entry.op for entry in self.entries)

    def __enter__(self) -> Overlay:
        stack = overlay_table.Stack(self, self.handlers, _context.rules())
        with contextlib.ExitStack() as undo:  # should any of it fail
            _context.begin_rules(overlay_table.begin)
            undo.callback(_context.end_rules, overlay_table.end)
            # a GPU's backward has a thread of its own
            _context.hold_backward(lambda: torch.autograd.set_multithreading_enabled(False))
            _context.put_rules(stack)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = _context.own_rules()
        if stack is not None:
            rest = stack.without(self)
            _context.put_rules(None if rest is not None and rest.everywhere else rest)
        _context.release_backward()
        _context.end_rules(overlay_table.end)

    def everywhere(self) -> None:
        """For good, in every thread of the process that has no overlay of its own."""
        _context.begin_rules(overlay_table.begin)
        _context.put_process_rules(overlay_table.Stack(self, self.handlers, _context.process_rules(), everywhere=True))

    def __repr__(self) -> str:
        return f"Overlay({len(self.entries)} rules)"


def _among(book: Book, only: Iterable[object] | None) -> list[Entry]:
    """The entries that are asked for, each looked at."""
    if isinstance(only, str):
        raise BadOverlay("only", repr(only), "this is one name, and no list of names", f"Write [{only!r}].")
    names = [entry.op for entry in book]
    globs = None if only is None else list(map(str, only))
    for glob in globs or ():
        if not fnmatch.filter(names, glob):
            raise BadOverlay("only", repr(glob), "the book has no such overload", "Write them as `aten.add.Tensor`.")
    kept = [entry for entry in book if globs is None or any(fnmatch.fnmatchcase(entry.op, glob) for glob in globs)]
    for entry in kept:
        _check(entry)
    return kept


def _check(entry: Entry) -> None:
    fault = fault_of(entry.op, entry)
    if fault is not None:
        values, problem, remedy = fault
        raise BadOverlay("book", f"the rule of {entry.op} at {entry.where}: {values}", problem, remedy)


def _wanted(op: torch._ops.OpOverload, *, add: bool, replace: bool) -> bool:
    known = bool(torch_dtensor.source_of(op)) or op in overlay_table.torch_handlers()
    return replace if known else add
