"""Device meshes as integers: named axes and their sizes, ranks in row-major order, no process group."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Protocol

from localtensor.errors import BadMesh


class Printer(Protocol):
    """The part of a pretty printer that we use, IPython's or that of Hypothesis."""

    def text(self, text: str) -> object: ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks with named axes, in row-major order: the last axis varies fastest.

    >>> Mesh.of(dp=2, tp=3)
    Mesh(dp=2, tp=3)
    >>> Mesh.of(dp=2, tp=3).groups("tp")
    ((0, 1, 2), (3, 4, 5))
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        shown = f"sizes={self.sizes}, names={self.names}"
        if not self.sizes or len(self.sizes) != len(self.names):
            raise BadMesh("Mesh", shown, "sizes and names must pair up, at least one of each")
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in self.sizes):
            raise BadMesh("Mesh", shown, "a size is no whole number of ranks")
        if len(set(self.names)) != len(self.names):
            raise BadMesh("Mesh", shown, "two axes share a name")

    @classmethod
    def of(cls, *sizes: int, **named: int) -> Mesh:
        """A mesh from sizes alone (axes are called a, b, c ...) or from name=size pairs."""
        names = tuple(ascii_lowercase[: len(sizes)]) + tuple(named)
        return cls(tuple(sizes) + tuple(named.values()), names)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def axis(self, name: str) -> int:
        """The index of the axis of this name.  Raises `BadMesh` if there is none."""
        if name not in self.names:
            raise BadMesh("Mesh.axis", repr(name), f"the axes are {', '.join(self.names)}", "name", "Name one of them.")
        return self.names.index(name)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank on each axis.  Raises `BadMesh` for a rank that is not in the mesh."""
        if not 0 <= rank < self.ranks:
            problem = f"the ranks are 0 to {self.ranks - 1}"
            raise BadMesh("Mesh.coordinate", f"rank {rank}", problem, "rank", "Name one of them.")
        place = []
        for size in reversed(self.sizes):
            place.append(rank % size)
            rank //= size
        return tuple(reversed(place))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """The rank at a coordinate, the inverse of `coordinate`.  Raises `BadMesh` outside of the mesh."""
        number = 0
        for size, place in zip(self.sizes, coordinate, strict=True):
            if not 0 <= place < size:
                problem = f"the sizes are {self.sizes}, and places count from 0"
                raise BadMesh("Mesh.rank", str(coordinate), problem, "coordinate", "Name a place on each axis.")
            number = number * size + place
        return number

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The groups along one axis: ranks that differ in that axis only, in its order.  Raises `BadMesh`."""
        axis = self.axis(name)
        others = [range(size) for i, size in enumerate(self.sizes) if i != axis]
        return tuple(
            tuple(self.rank((*rest[:axis], i, *rest[axis:])) for i in range(self.sizes[axis]))
            for rest in itertools.product(*others)
        )

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """Print a call that makes this mesh, for failing examples of Hypothesis."""
        printer.text(f"Mesh({self.sizes}, {self.names})")

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in zip(self.names, self.sizes, strict=True))})"
