"""Why a key missed: which kept key is nearest, and in what it differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from localtensor.concurrency.single_flight_cells import brief

Parts = Callable[[Any], Mapping[str, Any]]
ABSENT = "(not given)"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A value and how it is shown.  A quiet one is not listed among what is the same."""

    value: Any
    text: str
    quiet: bool = False

    def __repr__(self) -> str:
        return self.text


def parts_of(key: Hashable) -> Mapping[str, Any]:
    """The named parts of a key: the fields of a dataclass or named tuple, the places of a tuple, or itself.

    >>> parts_of(("add", 1))
    {'[0]': 'add', '[1]': 1}
    """
    if dataclasses.is_dataclass(key):
        return {field.name: getattr(key, field.name) for field in dataclasses.fields(key)}
    if isinstance(key, tuple):
        names = getattr(type(key), "_fields", None) or [f"[{i}]" for i in range(len(key))]
        return dict(zip(names, key, strict=True))
    return {"key": key}


def miss_explained(key: Hashable, kept: Iterable[Hashable], parts: Parts = parts_of) -> str:
    """One line: what is the same in the nearest kept key, and what is not.

    >>> miss_explained(("sum", "S(0)", -1), [("mul", "R", 1), ("sum", "S(0)", 1)])
    'same [0] and [1]; differs in: [2]=-1 vs 1'
    """
    mine = parts(key)
    nearest: tuple[list[str], Mapping[str, Any]] | None = None
    for other in kept:
        theirs = parts(other)
        differ = [name for name in {**mine, **theirs} if not _same(mine, theirs, name)]
        if nearest is None or len(differ) < len(nearest[0]):
            nearest = differ, theirs
    if nearest is None:
        return "nothing is kept"
    differ, theirs = nearest
    same = [name for name, part in mine.items() if name not in differ and not getattr(part, "quiet", False)]
    shared = f"same {_list(same)}; " if same else ""
    return f"{shared}differs in: {', '.join(f'{n}={_shown(mine, n)} vs {_shown(theirs, n)}' for n in differ)}"


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> bool:
    if name not in mine or name not in theirs:
        return False
    one, other = mine[name], theirs[name]
    return one is other or (type(one) is type(other) and bool(one == other))


def _shown(parts: Mapping[str, Any], name: str) -> str:
    return brief(parts[name]) if name in parts else ABSENT


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
