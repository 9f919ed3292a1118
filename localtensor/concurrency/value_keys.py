"""Values as parts of the keys of a cache: equal keys, equal answers.

1, 1.0 and True are equal in Python and mean different things, and so do 0.0 and -0.0; NaN is equal to itself here.  What
one cache knows besides, the tensors of a call say, it writes itself: that is its `leaf`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from math import isnan
from typing import Any

import torch

AS_IT_IS = frozenset({
    int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme,
})  # fmt: skip
"""No value of these types equals one of another, but for bool, which is not among them; all else becomes a tuple."""
_COMMON = frozenset({bool, float, list, tuple, dict})
_TRUE, _FALSE = (bool, True), (bool, False)


class Same:
    """An object that equals itself only, and lives as long as it is part of a key: its id is nobody else's."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"<this {type(self.thing).__name__}>"


def value_key(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """A value with its type, as something that can be hashed; `leaf` is asked for what is of no common type.

    >>> value_key([1, (2.0, True)], repr)
    (<class 'list'>, 1, (<class 'tuple'>, (<class 'float'>, 2.0), (<class 'bool'>, True)))
    """
    kind = type(value)
    if kind in AS_IT_IS:
        return value  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        parts: list[Any] = [kind]
        for item in value:  # written out: it is asked at each lookup, and `leaf` would be a cell of a comprehension
            kind = type(item)
            parts.append(item if kind in AS_IT_IS else value_key(item, leaf) if kind in _COMMON else leaf(item))
        return tuple(parts)
    if kind is bool:
        return _TRUE if value else _FALSE
    if kind is float:
        return (float, value) if value and not isnan(value) else (float, repr(value))
    if kind is dict:
        return (dict, *[(value_key(name, leaf), value_key(item, leaf)) for name, item in value.items()])
    return leaf(value)


def rare_key(value: Any, leaf: Callable[[Any], Hashable], refused: Callable[[Any], Exception]) -> Hashable:
    """The same for the less common types, for a `leaf` to end with.  Raises `refused(value)` for any other."""
    kind = type(value)
    if isinstance(value, Mapping):
        return (kind, value_key(dict(value), leaf))
    if isinstance(value, (list, tuple)):
        return (kind, *[value_key(item, leaf) for item in value])
    if kind is complex:
        return (complex, value_key(value.real, leaf), value_key(value.imag, leaf))
    if kind is bytes or isinstance(value, enum.Enum):
        return (kind, value if kind is bytes else value.name)
    raise refused(value)
