"""The table of op handlers in DTensor's dispatcher, through which overlays and guards intercept calls.

DTensor looks an op up in its dispatcher's `_custom_op_handlers` at each call, before its own rules and its caches.
While any overlay is active, that attribute is a property that returns the table of the current thread and task; without
an overlay there, torch's own table.  So our rules never fill the caches that torch keeps for each thread, and threads
without an overlay see torch unchanged.

Code that writes to the table (`loss_parallel`, `context_parallel`) writes to torch's own one.  Its handlers take
precedence over overlays that were entered before.

| torch part (under torch.distributed.tensor)                                 | read on     | run on |
|------------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher: its class has the property for a while               | 2.11 - 2.15 | 2.13   |
| ._custom_op_handlers: a dict by overload, fetched at each call (C++), read   | 2.11 - 2.15 | 2.13   |
| as a plain dict: a subclass's own `get` is not called                        |             |        |

`tests/strategies/torch_api/test_handler_table.py` checks each part by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from localtensor._util import ambient

HANDLERS_ATTRIBUTE = "_custom_op_handlers"
Handler = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], object]
Handlers = Mapping[torch._ops.OpOverload, Handler]
HandlerTable = dict[torch._ops.OpOverload, Handler]


class OverlayHandler:
    """A handler of an overlay, distinguished from torch's own by its class."""

    applies_rules = True
    """Whether the result is each rank's result with placements from a rule."""
    __slots__ = ("run",)

    def __init__(self, run: Handler) -> None:
        self.run = run

    def __call__(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return self.run(op, args, kwargs)


class OverlayStack:
    """The handlers of nested overlays, the innermost first; `below` is the rest.  Immutable.

    `everywhere` marks the stack of the whole process.
    """

    def __init__(
        self, overlay: object, handlers: Handlers, below: OverlayStack | None, *, everywhere: bool = False
    ) -> None:
        self.overlay, self.below, self.everywhere = overlay, below, everywhere
        self._own = dict(handlers)
        self.handlers: dict[torch._ops.OpOverload, Handler] = {**(below.handlers if below else {}), **self._own}
        self._at_entry = dict(torch_handlers())  # later handlers take precedence over this overlay
        self._views = HandlerTableViews(self._view)

    def over(self, table: dict[Any, Any]) -> HandlerTableView:
        """torch's table with the overlays' handlers over it."""
        return self._views.of(table)

    def _view(self, table: dict[Any, Any]) -> HandlerTableView:
        later = {op: handler for op, handler in table.items() if self._at_entry.get(op) is not handler}
        return HandlerTableView(table, {**table, **self.handlers, **later})

    def without(self, overlay: object) -> OverlayStack | None:
        """The same without the innermost entry of that overlay."""
        if self.overlay is overlay or self.below is None:
            return self.below
        return OverlayStack(self.overlay, self._own, self.below.without(overlay))


class HandlerTableView(HandlerTable):
    """torch's table as seen by a thread with an overlay.  Writes go to torch's table."""

    def __init__(self, table: dict[Any, Any], seen: Mapping[Any, Any]) -> None:
        super().__init__(seen)
        self.table = table

    def __setitem__(self, key: torch._ops.OpOverload, value: Handler) -> None:
        self.table[key] = value

    def __delitem__(self, key: torch._ops.OpOverload) -> None:
        del self.table[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.table.update(*args, **kwargs)

    def pop(self, key: torch._ops.OpOverload, *default: object) -> Any:
        return self.table.pop(key, *default)

    def setdefault(self, key: torch._ops.OpOverload, default: Any = None) -> Any:
        return self.table.setdefault(key, default)

    def copy(self) -> dict[Any, Any]:
        return self.table.copy()


class HandlerTableViews:
    """A cache of the views that `make` makes of tables.  A view is remade after its table has changed."""

    def __init__(self, make: Callable[[dict[Any, Any]], HandlerTableView]) -> None:
        self._make = make
        # By identity: table, copy, view.
        self._known: dict[int, tuple[dict[Any, Any], dict[Any, Any], HandlerTableView]] = {}

    def of(self, table: dict[Any, Any]) -> HandlerTableView:
        known = self._known.get(id(table))
        if known is not None and known[0] is table and (type(table) is HandlerTableView or known[1] == table):
            return known[2]
        if len(self._known) > 64:  # each rank of a run has a table of its own
            self._known.clear()
        view = self._make(table)
        self._known[id(table)] = table, dict(table), view
        return view


def torch_handlers() -> dict[Any, Any]:
    """torch's own table."""
    return vars(DTensor._op_dispatcher)[HANDLERS_ATTRIBUTE]  # type: ignore[no-any-return]


def install_property() -> None:
    """Replace the dispatcher's attribute by the property."""
    setattr(type(DTensor._op_dispatcher), HANDLERS_ATTRIBUTE, property(_get, _set))


def remove_property() -> None:
    """Restore the plain attribute."""
    delattr(type(DTensor._op_dispatcher), HANDLERS_ATTRIBUTE)


def _get(dispatcher: object) -> HandlerTable:
    table: HandlerTable = vars(dispatcher)[HANDLERS_ATTRIBUTE]
    stack, guard = ambient.rules(), ambient.guard()
    seen = table if stack is None else stack.over(table)
    return seen if guard is None else guard.over(seen)


def _set(dispatcher: object, value: HandlerTable) -> None:
    """Replace torch's table.  Overlays' handlers in the new one, copied from a view, are left out."""
    table = vars(dispatcher)[HANDLERS_ATTRIBUTE]
    if isinstance(value, HandlerTableView):
        value = value.table
    elif any(isinstance(handler, OverlayHandler) for handler in value.values()):
        given = value.items()
        beneath = {op: table.get(op) if isinstance(handler, OverlayHandler) else handler for op, handler in given}
        value = {op: handler for op, handler in beneath.items() if handler is not None}
    vars(dispatcher)[HANDLERS_ATTRIBUTE] = value
