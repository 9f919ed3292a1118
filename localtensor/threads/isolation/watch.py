"""Which of many dicts, lists and sets have changed, found by reading words of their memory, all at once.

A hand-over between ranks takes some ten microseconds, and a program may have thousands of namespaces: to ask each in
Python would take longer than to run it.  CPython gives a dict another version number with every change (up to 3.12);
lists and sets have none, but a size, a table and the addresses of their elements.  NumPy gathers those words in one call.
Where a check at import shows that the words are elsewhere, each dict is compared with a copy.
"""

import ctypes
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

_WORD = ctypes.sizeof(ctypes.c_uint64)
_VERSION = object.__basicsize__ + _WORD  # bytes from the start of a dict to its version
_LONGEST = 4096  # elements of a list or set that are watched one by one; of longer ones, only size and table
_MEMORY = np.ctypeslib.as_array((ctypes.c_uint64 * ((1 << 44) - 1)).from_address(_WORD))
_Words = Any  # an array of indices into _MEMORY, or of the words there


def _word(address: int) -> int:
    return int(_MEMORY[address // _WORD - 1])


def _has_versions() -> bool:
    """Whether each change of a dict changes the word at `_VERSION`, and nothing else does."""
    probe: dict[str, int] = {"a": 1}
    place = id(probe) + _VERSION

    def changed_by(action: Any) -> bool:
        before = _word(place)
        action()
        return _word(place) != before

    writes = (lambda: probe.update(a=2), lambda: probe.update(b=1), lambda: probe.pop("b"), probe.clear)
    return all(map(changed_by, writes)) and not changed_by(lambda: (probe.get("a"), dict(probe), len(probe)))


def _has_layout() -> bool:
    """Whether a list and a set keep their size and their table where `_head` looks."""
    items, members = [1, 2, 3], {1, 2, 3}
    listed = [_word(id(items) + 16), _word(_word(id(items) + 24))] == [3, id(items[0])]
    mask, table = _word(id(members) + 32), _word(id(members) + 40)
    held = {_word(table + 16 * at) for at in range(mask + 1)} if mask == 7 else set()
    return listed and _word(id(members) + 24) == 3 and set(map(id, members)) <= held


ON_SIGHT = _has_versions() and _has_layout()


def _head(container: Any) -> list[int]:
    """The addresses of the words that show most changes."""
    if isinstance(container, OrderedDict):  # its order is beside the dict
        return [id(container) + at for at in (_VERSION, *range(dict.__basicsize__, OrderedDict.__basicsize__, _WORD))]
    if isinstance(container, dict):
        return [id(container) + _VERSION]
    if isinstance(container, list):
        return [id(container) + 16, id(container) + 24]  # size, table
    if isinstance(container, deque):
        return [id(container) + at for at in range(16, 64, 8)]  # size, blocks, indices, number of changes of size
    return [id(container) + at for at in (16, 24, 32, 40)]  # slots that were used, size, mask, table


def _elements(container: Any) -> list[int]:
    """The addresses of the words that name the elements of a list or set."""
    if isinstance(container, dict | deque) or len(container) > _LONGEST:
        return []
    if isinstance(container, list):
        table = _word(id(container) + 24)
        return [table + _WORD * at for at in range(len(container))]
    table = _word(id(container) + 40)
    return [table + 2 * _WORD * at for at in range(_word(id(container) + 32) + 1)]


def _indices(addresses: Sequence[int]) -> _Words:
    return np.array(addresses, dtype=np.int64) // _WORD - 1


class Watch:
    """Containers, and their words as last read."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self._heads = self._first_heads = self._head_owners = self._elements = self._element_owners = _indices([])
        self._listed: dict[int, None] = {}  # the lists and sets among them
        self.read(())

    def add(self, containers: Sequence[Any]) -> None:
        """Watch these, too, from now on."""
        first = len(self.containers)
        self.containers += containers
        heads = [(at, word) for at, one in enumerate(containers, first) for word in _head(one)]
        starts = len(self._heads) + np.cumsum([0, *(len(_head(one)) for one in containers)])[:-1]
        self._first_heads = np.concatenate([self._first_heads, starts])
        self._heads = np.concatenate([self._heads, _indices([word for _, word in heads])])
        self._head_owners = np.concatenate([self._head_owners, np.array([at for at, _ in heads], dtype=np.int64)])
        self._listed.update((at, None) for at, one in enumerate(containers, first) if not isinstance(one, dict))
        self.read(range(first, len(self.containers)))

    def read(self, changed: Collection[int]) -> None:
        """Take what is there now as unchanged; `changed`: the containers that may differ from the last time."""
        if self._listed and any(at in self._listed for at in changed):
            found = [(at, word) for at in self._listed for word in _elements(self.containers[at])]
            self._elements = _indices([word for _, word in found])
            self._element_owners = np.array([at for at, _ in found], dtype=np.int64)
        self._head_words, self._element_words = _MEMORY.take(self._heads), _MEMORY.take(self._elements)
        self._now = self._head_words.copy()
        self._head_bytes, self._element_bytes = self._head_words.tobytes(), self._element_words.tobytes()

    def places(self, dicts: Sequence[int]) -> tuple[_Words, _Words]:
        """What `refresh` takes to read these dicts; valid until more containers are added."""
        places = self._first_heads[np.array(dicts, dtype=np.int64)]
        return places, self._heads[places]

    def refresh(self, places: tuple[_Words, _Words]) -> None:
        """As `read`, of some dicts only."""
        at, heads = places
        self._head_words[at] = _MEMORY.take(heads)
        self._head_bytes = self._head_words.tobytes()

    def changed(self) -> list[int]:
        """The containers that have changed since the last `read`."""
        heads = _MEMORY.take(self._heads, out=self._now, mode="clip")
        if heads.tobytes() == self._head_bytes:
            if not self._element_bytes:
                return []
            elements = _MEMORY.take(self._elements)
            if elements.tobytes() == self._element_bytes:
                return []
            return sorted(set(self._element_owners[elements != self._element_words].tolist()))
        owners = set(self._head_owners[heads != self._head_words].tolist())
        stay = ~np.isin(self._element_owners, list(owners))  # the old table of the others may have been freed
        other = _MEMORY.take(self._elements[stay]) != self._element_words[stay]
        return sorted(owners | set(self._element_owners[stay][other].tolist()))
