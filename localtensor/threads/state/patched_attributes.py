"""Slots that keep a rank's temporary patches on that rank: mock.patch, monkeypatch, assertLogs, and those of a type checker.

In a real run each process has its own modules, and so its own patches.  On rank threads a patch would apply to all
ranks, and what the ranks restore would depend on their order.  So each place that a rank patches during a run is
recorded, and a hand-over swaps its value.

A patch object that decorates a function is shared by all ranks, and keeps what it will restore: each rank enters a copy.
"""

import copy
import functools
import logging
import pkgutil
import sys
import threading
from collections.abc import Callable
from typing import Any

from localtensor._util.ambient import running
from localtensor.threads.state.generators import RankIdentity

_NOTHING: Any = object()  # the value of a missing attribute


class Attribute:
    """An attribute in the namespace of a module, a class or an object, and its value before the run."""

    __slots__ = ("before", "name", "owner")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.before = self.get()

    def get(self) -> object:
        return getattr(self.owner, "__dict__", {}).get(self.name, _NOTHING)

    def put(self, value: Any) -> None:
        if value is self.get():
            return
        if value is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class LoggerLevel(Attribute):
    """The level of a logger, set through setLevel, which clears the logger's cache."""

    __slots__ = ()

    def put(self, value: int) -> None:
        if value != self.owner.level:
            self.owner.setLevel(value)


class DictContents:
    """The contents of a dict, as patched by `patch.dict`."""

    __slots__ = ("before", "name", "owner")

    def __init__(self, owner: dict[Any, Any]) -> None:
        self.owner, self.name = owner, ""
        self.before = self.get()

    def get(self) -> object:
        return dict(self.owner)

    def put(self, value: Any) -> None:
        self.owner.clear()
        self.owner.update(value)


PatchedPlace = Attribute | DictContents


def _contents(owner: object) -> list[PatchedPlace]:
    """The contents of a dict.  os.environ is not a dict, and has a slot of its own; ranks have their own sys.modules."""
    return [DictContents(owner)] if isinstance(owner, dict) and owner is not sys.modules else []


kept_elsewhere: list[
    Callable[[object], bool]
] = []  # of an owner: whether threads/isolation keeps what ranks write there


class PatchSlot:
    """A slot with the values of all places that a rank of this run has patched, by place."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], PatchedPlace] = {}

    def save(self) -> dict[PatchedPlace, Any]:
        return {place: place.get() for place in self.places.values()} if self.places else {}

    def load(self, want: dict[PatchedPlace, Any], held: dict[PatchedPlace, Any]) -> None:
        for place in self.places.values():
            place.put(want.get(place, place.before))

    def initial(self, who: RankIdentity) -> dict[PatchedPlace, Any]:
        return self.outside()

    def outside(self) -> dict[PatchedPlace, Any]:
        """Every place as it was before the run."""
        return {}

    def over(self) -> None:
        """Forget the patched places after the run, when all are restored."""
        self.places.clear()

    def noting(self, kind: type, method: str, places_of: Callable[..., list[PatchedPlace]]) -> None:
        """Wrap `kind.method`, so that a call during a run notes the places that it patches."""
        original = getattr(kind, method)

        @functools.wraps(original)
        def noted(*args: object, **kwargs: object) -> object:
            if running() is None:
                return original(*args, **kwargs)
            places = places_of(*args, **kwargs)
            answer = original(*args, **kwargs)
            for place in places:
                if kept_elsewhere and kept_elsewhere[0](place.owner):
                    continue
                self.places.setdefault((id(place.owner), place.name), place)
            return answer

        setattr(kind, method, noted)


class _EnteredPatches(threading.local):
    """The patches that a thread (a rank) has entered, by id, each with the entered copy."""

    def __init__(self) -> None:
        self.copies: dict[int, list[tuple[Any, Any]]] = {}


class MockPatches(PatchSlot):
    """`mock.patch`, `mock.patch.object`, `mock.patch.multiple` and `mock.patch.dict`, as blocks and as decorators."""

    name = "patches"
    why = "the last rank to enter a patch would have it for all, and the last to leave put another's patch back"

    def __init__(self) -> None:
        super().__init__()
        self.entered = _EnteredPatches()

    def ready(self) -> bool:
        return hasattr(getattr(sys.modules.get("unittest.mock"), "patch", None), "stopall")

    def bind(self) -> None:
        patch = sys.modules["unittest.mock"].patch
        kind: Any = type(patch("os.name"))
        self.noting(kind, "__enter__", lambda block: [Attribute(block.getter(), block.attribute)])
        self.noting(patch.dict, "_patch_dict", self._contents)
        self._copying(kind)

    def inside(self) -> bool:
        """Whether the rank of this thread has entered a patch."""
        return bool(self.entered.copies)

    def _copying(self, kind: Any) -> None:
        enter, leave = kind.__enter__, kind.__exit__

        def entered(block: object) -> object:
            if running() is None:
                return enter(block)
            mine = copy.copy(block)
            answer = enter(mine)
            self.entered.copies.setdefault(id(block), []).append((block, mine))
            return answer

        def left(block: object, *info: object) -> object:
            copies = self.entered.copies.get(id(block), [])
            _, mine = copies.pop() if copies else (block, block)
            if not copies:
                self.entered.copies.pop(id(block), None)
            return leave(mine, *info)

        kind.__enter__, kind.__exit__ = entered, left

    def _contents(self, block: Any) -> list[PatchedPlace]:
        """The dict that `patch.dict` changes."""
        return _contents(pkgutil.resolve_name(block.in_dict) if isinstance(block.in_dict, str) else block.in_dict)


class AssertedLogs(PatchSlot):
    """`TestCase.assertLogs`, which gives a logger handlers of its own for a while."""

    name = "asserted_logs"
    why = "assertLogs on one rank would capture what another rank logs, or nothing"

    def ready(self) -> bool:
        return hasattr(sys.modules.get("unittest.case"), "TestCase")

    def bind(self) -> None:
        test: Any = sys.modules["unittest.case"].TestCase()
        self.noting(type(test.assertLogs()), "__enter__", self._logger)

    def _logger(self, block: Any) -> list[PatchedPlace]:
        named = block.logger_name
        logger = named if isinstance(named, logging.Logger) else logging.getLogger(named)
        return [Attribute(logger, "handlers"), Attribute(logger, "propagate"), LoggerLevel(logger, "level")]


class MonkeyPatches(PatchSlot):
    """`pytest.MonkeyPatch`: one object for all ranks, which restores everything at the end of the test."""

    name = "monkeypatches"
    why = "what the last rank sets by monkeypatch would be there for all"

    def ready(self) -> bool:
        return hasattr(sys.modules.get("pytest"), "MonkeyPatch")

    def bind(self) -> None:
        kind = sys.modules["pytest"].MonkeyPatch
        for method in ("setattr", "delattr"):
            self.noting(kind, method, self._attribute)
        for method in ("setitem", "delitem"):
            self.noting(kind, method, self._contents)

    def _attribute(
        self, _: object, target: object, name: Any = None, *rest: object, **options: object
    ) -> list[PatchedPlace]:
        if isinstance(target, str):
            home, _, name = target.rpartition(".")
            target = pkgutil.resolve_name(home)
        return [Attribute(target, name)]

    def _contents(self, _: object, dic: object, *rest: object, **options: object) -> list[PatchedPlace]:
        return _contents(dic)


class TypecheckPatches(PatchSlot):
    """`spmd_types.checker.typecheck()`, which patches torch while its block runs, and keeps what it replaced.

    Read on spmd_types 0.2.3 and 0.3.1.  All ranks share that package, since torch imports it.
    """

    name = "typecheck"
    why = "the first rank to leave a block would take the patches from those still in it, whose types are then wrong"
    patched = (
        ("torch.autograd:Function", "apply"),
        ("torch._functorch.vmap", "_flat_vmap"),
        ("torch.utils.hooks:BackwardHook", "setup_input_hook"),
        ("torch.utils.hooks:BackwardHook", "setup_output_hook"),
    )
    kept = (
        ("spmd_types._checker", "_orig_autograd_apply"),
        ("spmd_types._vmap", "_orig_flat_vmap"),
        ("spmd_types._backward_hooks", "_orig_setup_input_hook"),
        ("spmd_types._backward_hooks", "_orig_setup_output_hook"),
    )
    """The names of what was replaced; None outside of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = list(self.kept)  # in modules that are not imported yet
        for owner, name in self.patched:
            self._add(Attribute(pkgutil.resolve_name(owner), name))

    def _add(self, place: Attribute) -> None:
        self.places[id(place.owner), place.name] = place

    def ready(self) -> bool:
        return "spmd_types._checker" in sys.modules

    def save(self) -> dict[PatchedPlace, Any]:
        for module, name in [one for one in self.waiting if one[0] in sys.modules]:
            place = Attribute(sys.modules[module], name)
            place.before = None
            self._add(place)
            self.waiting.remove((module, name))
        return super().save()

    def over(self) -> None:
        """The places stay: they are the same in each run."""


PATCHES = (MockPatches, AssertedLogs, MonkeyPatches, TypecheckPatches)
