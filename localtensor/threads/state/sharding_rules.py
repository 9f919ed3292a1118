"""DTensor's tables of sharding rules: what a rank registers in its program is its own, as in a process.

A rule that a module registers when it is imported is for all ranks, since Python imports a module only once.  What a
rank writes later, `register_sharding` in the body of a test say, is swapped at each hand-over, key by key, and gone
when the run is over.
"""

import sys
from typing import Any

from localtensor.threads.state.generators import Who
from localtensor.threads.state.slots import TRIED

# Private part of torch: why it is needed.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
PRIVATE = {
    "torch.distributed.tensor.DTensor._op_dispatcher": "where the one propagator of the process is, with its tables",
}
TABLES = (
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_rules",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
    "op_to_scalar_shape_adjuster",
)
_GONE: Any = object()
_IMPORTS = ("exec_module", "_call_with_frames_removed")  # functions that run the body of a module


class Table(dict[Any, Any]):
    """One of the tables.  `changed` holds, for each key that a program has written, what was there before."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.changed: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        if key in self:
            self._note(key)
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _note(self, key: Any) -> None:
        if key not in self.changed and not importing():
            self.changed[key] = self.get(key, _GONE)

    def differences(self) -> dict[Any, Any]:
        """What there is now under the keys where it is not what was there before."""
        now = {key: self.get(key, _GONE) for key in self.changed}
        return {key: value for key, value in now.items() if value is not self.changed[key]}

    def put(self, key: Any, value: Any) -> None:
        if value is not _GONE:
            super().__setitem__(key, value)
        elif key in self:
            super().__delitem__(key)


def importing() -> bool:
    """Whether the body of a module is running, on its first import."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name == "<module>" and caller is not None and caller.f_code.co_name in _IMPORTS:
            return True
        frame = caller
    return False


class ShardingRules:
    """The slot: what each rank has under the keys that any rank has written."""

    name, tried = "sharding_rules", TRIED
    why = "the rank that leaves a block with a rule of its own would take the rule from those still in it"

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def ready(self) -> bool:
        return hasattr(self._propagator(), TABLES[0])

    def _propagator(self) -> Any:
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        return getattr(getattr(dtensor, "_op_dispatcher", None), "sharding_propagator", None)

    def bind(self) -> None:
        propagator = self._propagator()
        for name in TABLES:
            if hasattr(propagator, name):
                self.tables.append(Table(getattr(propagator, name)))
                setattr(propagator, name, self.tables[-1])

    def save(self) -> list[dict[Any, Any]]:
        return [table.differences() if table.changed else {} for table in self.tables]

    def load(self, want: list[dict[Any, Any]], held: list[dict[Any, Any]]) -> None:
        for table, mine in zip(self.tables, want, strict=True):
            for key, before in table.changed.items():
                table.put(key, mine.get(key, before))

    def initial(self, who: Who) -> list[dict[Any, Any]]:
        """The tables as they are: what the last run changed in them is over."""
        for table in self.tables:
            table.changed.clear()
        return self.outside()

    def late(self, who: Who) -> list[dict[Any, Any]]:
        return self.outside()

    def outside(self) -> list[dict[Any, Any]]:
        return [{} for _ in self.tables]
