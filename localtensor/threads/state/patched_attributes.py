"""What a rank patches for a while is patched on that rank: slots for mock.patch, for monkeypatch and for assertLogs.

In a real run each process has its own modules, and so its own patches.  On rank threads the last rank to enter a
patch would have it for all, and what the ranks put back when they leave depends on their order.  Here each place that
a rank patches during a run is noted, and a hand-over swaps what stands there.

A patch object that decorates a function is one for all ranks, and keeps in itself what it will put back: each rank
enters a copy of its own.
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
from localtensor.threads.state.generators import Who
from localtensor.threads.state.slots import TRIED

_NOTHING: Any = object()  # stands where no attribute is


class Attribute:
    """An attribute in the namespace of a module, a class or an object, and what was there before any rank came."""

    __slots__ = ("before", "name", "owner")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.before = self.get()

    def get(self) -> Any:
        return getattr(self.owner, "__dict__", {}).get(self.name, _NOTHING)

    def put(self, value: Any) -> None:
        if value is self.get():
            return
        if value is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Level(Attribute):
    """The level of a logger, which remembers the answers that it gave by it."""

    __slots__ = ()

    def put(self, value: int) -> None:
        if value != self.owner.level:
            self.owner.setLevel(value)


class Contents:
    """What is in a dict, as with `patch.dict`."""

    __slots__ = ("before", "name", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner, self.name = owner, ""
        self.before = self.get()

    def get(self) -> Any:
        return dict(self.owner)

    def put(self, value: Any) -> None:
        self.owner.clear()
        self.owner.update(value)


Place = Attribute | Contents


class _Slot:
    """The values of each place that a rank of this run has patched, by place."""

    tried = TRIED

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], Place] = {}

    def note(self, places: list[Place]) -> None:
        for place in places:
            self.places.setdefault((id(place.owner), place.name), place)

    def save(self) -> dict[Place, Any]:
        return {place: place.get() for place in self.places.values()} if self.places else {}

    def load(self, want: dict[Place, Any], held: dict[Place, Any]) -> None:
        for place in self.places.values():
            place.put(want.get(place, place.before))

    def initial(self, who: Who) -> dict[Place, Any]:
        return self.outside()

    def outside(self) -> dict[Place, Any]:
        """Everything as it was before any rank came."""
        return {}

    def over(self) -> None:
        """The run has ended, and all is as it was: nothing that was patched is held any longer."""
        self.places.clear()

    def noting(self, kind: Any, method: str, places_of: Callable[..., list[Place]]) -> None:
        """Whoever calls this method during a run has the places noted that it patches."""
        original = getattr(kind, method)

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if running() is None:
                return original(*args, **kwargs)
            places = places_of(*args, **kwargs)
            answer = original(*args, **kwargs)
            self.note(places)
            return answer

        setattr(kind, method, noted)


class _Entered(threading.local):
    """Each thread's, and so each rank's: the patches that it is in, by id; each with the copy that was entered."""

    def __init__(self) -> None:
        self.copies: dict[int, list[tuple[Any, Any]]] = {}


class Patches(_Slot):
    """`mock.patch`, `mock.patch.object`, `mock.patch.multiple` and `mock.patch.dict`, as blocks and as decorators."""

    name = "patches"
    why = "the last rank to enter a patch would have it for all, and the last to leave put another's patch back"

    def __init__(self) -> None:
        super().__init__()
        self.entered = _Entered()

    def ready(self) -> bool:
        return hasattr(getattr(sys.modules.get("unittest.mock"), "patch", None), "stopall")

    def bind(self) -> None:
        patch = sys.modules["unittest.mock"].patch
        kind: Any = type(patch("os.name"))
        self.noting(kind, "__enter__", lambda block: [Attribute(block.getter(), block.attribute)])
        self.noting(patch.dict, "_patch_dict", self._contents)
        self._copying(kind)

    def inside(self) -> bool:
        """Whether the rank of this thread is in a patch."""
        return bool(self.entered.copies)

    def _copying(self, kind: Any) -> None:
        enter, leave = kind.__enter__, kind.__exit__

        def entered(block: Any) -> Any:
            if running() is None:
                return enter(block)
            mine = copy.copy(block)
            answer = enter(mine)
            self.entered.copies.setdefault(id(block), []).append((block, mine))
            return answer

        def left(block: Any, *info: Any) -> Any:
            copies = self.entered.copies.get(id(block), [])
            _, mine = copies.pop() if copies else (block, block)
            if not copies:
                self.entered.copies.pop(id(block), None)
            return leave(mine, *info)

        kind.__enter__, kind.__exit__ = entered, left

    def _contents(self, block: Any) -> list[Place]:
        """The dict that `patch.dict` changes; os.environ is none, and has a slot of its own."""
        owner = pkgutil.resolve_name(block.in_dict) if isinstance(block.in_dict, str) else block.in_dict
        return [Contents(owner)] if isinstance(owner, dict) else []


class Logs(_Slot):
    """`TestCase.assertLogs`, which gives a logger handlers of its own for a while."""

    name = "asserted_logs"
    why = "assertLogs on one rank would hear what another rank logs, or nothing"

    def ready(self) -> bool:
        return hasattr(sys.modules.get("unittest.case"), "TestCase")

    def bind(self) -> None:
        test: Any = sys.modules["unittest.case"].TestCase()
        self.noting(type(test.assertLogs()), "__enter__", self._logger)

    def _logger(self, block: Any) -> list[Place]:
        named = block.logger_name
        logger = named if isinstance(named, logging.Logger) else logging.getLogger(named)
        return [Attribute(logger, "handlers"), Attribute(logger, "propagate"), Level(logger, "level")]


class MonkeyPatches(_Slot):
    """`pytest.MonkeyPatch`: one for all ranks, which puts everything back when the test is over."""

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

    def _attribute(self, _: Any, target: Any, name: Any = None, *rest: Any, **options: Any) -> list[Place]:
        if isinstance(target, str):
            home, _, name = target.rpartition(".")
            target = pkgutil.resolve_name(home)
        return [Attribute(target, name)]

    def _contents(self, _: Any, dic: Any, *rest: Any, **options: Any) -> list[Place]:
        return [Contents(dic)] if isinstance(dic, dict) else []


PATCHES = (Patches, Logs, MonkeyPatches)
