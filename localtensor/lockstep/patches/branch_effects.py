"""What a statement that runs for some ranks may change besides the variables that it assigns: objects that all ranks share.

Each container, object, array, iterator and random generator that can be reached from what the statement reads is noted with what it holds;
afterwards each has to hold the same.  Functions of the user's are followed to their closures and to the globals that they name.
"""

from __future__ import annotations

import functools
import io
import logging
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import is_user_file
from localtensor.errors import NotInLockstep

MOST_HELD = 200_000
"""Members of all that is followed, beyond which the statement is refused."""
_ATOMS = (int, float, complex, str, bytes, type(None), range, slice)
_CONTAINERS = (dict, list, set, deque, bytearray, array, np.ndarray)
_OTHERS = (Tensor, logging.Logger, logging.Handler, io.IOBase)
"""Values that are not followed: writes to tensors are refused by the dispatch mode, and output is not undone."""
_OURS = ("torch.distributed.", "torch._C", "localtensor.")  # groups, meshes, modes
_RUNNERS = ("_pytest.config", "_pytest.main", "_pytest.python", "_pytest.unittest", "pluggy.")
"""Of the runner of tests, which a TestCase reaches; its caches change with every import.  Its fixtures are followed."""


class Effects:
    """The objects that can be reached from named values, and what they hold now.

    >>> numbers = [1, 2]
    >>> before = Effects({"numbers": numbers})
    >>> before.changed(), numbers.append(3), before.changed()
    ('', None, 'numbers')

    Raises `NotInLockstep` for an iterator that shows no state, and where too much can be reached.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._held: list[tuple[str, Any, Sequence[Any]]] = []
        seen: set[int] = set()
        left, many = [(name, value) for name, value in named.items()], 0
        while left:
            name, value = left.pop()
            if id(value) in seen or isinstance(value, _ATOMS):
                continue
            seen.add(id(value))
            members = _members(name, value)
            if members is None:
                continue
            self._held.append((name, value, members))
            many += len(members)
            if many > MOST_HELD:
                raise NotInLockstep(f"if: {name}", "so much can be reached from it that changes cannot be looked for")
            left += [(name, one) for one in members]

    def changed(self) -> str:
        """The name from which a changed object can be reached; empty if all hold what they did."""
        for name, value, before in self._held:
            now = _members(name, value)
            if now is None or len(now) != len(before) or not all(map(_same, now, before)):
                return name
        return ""


def _same(now: object, before: object) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, _ATOMS) and now == before)


def _members(name: str, value: Any) -> list[Any] | None:
    """What a value holds, whole or as one number or text that tells its state; None for one that holds nothing that can change."""
    if isinstance(value, _OTHERS) or type(value).__module__.startswith((*_OURS, *_RUNNERS)):
        return None
    if isinstance(value, ModuleType):
        return _state_of_module(value)
    if isinstance(value, FunctionType):
        return [*_of_function(value)] if is_user_file(value.__code__.co_filename) else None
    if isinstance(value, type):
        return [*vars(value).values()] if is_user_file(_file_of(value)) else None
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if (owner := getattr(value, "__self__", None)) is not None and callable(value):  # a method of C, as list.append
        return [owner]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    held = [*_of_container(name, value)]
    attributes = [*vars(value).items()] if hasattr(value, "__dict__") else []
    slots = _slots_of(type(value))  # type: ignore[arg-type]  # a metaclass without a hash does not come here
    held += [one for pair in attributes for one in pair]
    held += [getattr(value, one) for one in slots if hasattr(value, one)]
    if held or attributes or slots or isinstance(value, _CONTAINERS):
        return [*held, type(value)]
    return None


@functools.lru_cache(4096)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a type and of its bases."""
    each = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    names = [name for slots in each for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _of_container(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif isinstance(value, (bytearray, memoryview, array)):
        yield bytes(value)
    elif isinstance(value, np.ndarray):
        yield from value.flat if value.dtype == object else [value.tobytes()]
    elif isinstance(value, random.Random):
        yield str(value.getstate())
    elif isinstance(value, (np.random.Generator, np.random.RandomState)):
        yield str((value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator).state)
    elif isinstance(value, GeneratorType):
        yield None if value.gi_frame is None else value.gi_frame.f_lasti
    elif hasattr(value, "__next__"):
        try:
            _, given, *state = value.__reduce__()
        except TypeError:
            raise NotInLockstep(f"if: {name}", "it is read on some ranks only, and is one iterator for all") from None
        yield from given  # those that it reads, which have a state of their own
        for one in state:
            yield from one if isinstance(one, tuple) else (one,)


def _of_function(function: FunctionType) -> Iterator[Any]:
    """The values in a function's closure, its defaults, and the globals that it, or a function within it, names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            yield None
    yield from function.__defaults__ or ()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        for name in code.co_names:
            yield function.__globals__.get(name)


def _state_of_module(module: ModuleType) -> list[Any] | None:
    """The state of a module's random numbers, which are one stream for all ranks."""
    if module is random:
        return [str(random.getstate())]
    return [str(np.random.get_state())] if module in (np, np.random) else None


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ("" if kind.__module__ == "builtins" else "<none>")


class NoWrites(TorchDispatchMode):
    """Refuses ops that write to tensors which were there before: the other ranks have them, too."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        if schema.is_mutable:
            named = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
            for one in schema.arguments:
                written = named.get(one.name) if one.alias_info is not None and one.alias_info.is_write else None
                if any(isinstance(x, Tensor) and id(x) not in self._made for x in tree_leaves(written)):
                    raise NotInLockstep(f"if: {func}", "it writes on some ranks only to a tensor that all of them have")
        done = func(*args, **kwargs)
        if not any(one.alias_info is not None for one in schema.returns):
            self._made.update((id(x), x) for x in tree_leaves(done) if isinstance(x, Tensor))
        return done
