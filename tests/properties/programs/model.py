"""The parts of a rank program: steps (one collective, or messages that travel together) and each rank's events.

Every step reads its input from the rank's accumulator `acc` and mixes its results into it, so that one wrong number
changes all later results.  Numbers are small integers in every dtype, so that every result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZE, PRIME = 48, 1009
"""The number of elements of the accumulator, and the prime that bounds them."""

IN_PLACE = ("all_reduce", "reduce", "broadcast")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
LISTS = ("scatter", "reduce_scatter", "all_to_all")  # each rank, or the root, brings a list
FUNCTIONAL = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
SPLITS = ("all_to_all_single",)
MESSAGES = ("message", "batch")
COLLECTIVES = (
    *IN_PLACE, "all_gather", "all_gather_into_tensor", "gather", *LISTS, "reduce_scatter_tensor", *SPLITS, "permute",
    "barrier", *OBJECTS,
)  # fmt: skip
KINDS = (*COLLECTIVES, *MESSAGES)


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, or messages that travel together, from the view of one rank.

    `members`, `root` and `pairs` are global ranks; `pairs` are (sender, receiver), `order` the destination of each member
    in a permutation, `splits` the rows that each member sends to each.  `style` is "sync", "async" or "functional".
    """

    id: int
    kind: str
    group: int
    members: tuple[int, ...]
    style: str = "sync"
    dtype: str = "int64"
    shape: tuple[int, int] = (2, 1)
    op: str = "sum"
    root: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    tag: int = 0
    dim: int = 0
    layout: str = "plain"
    feed: tuple[int, int] = (1, 0)

    @property
    def involved(self) -> tuple[int, ...]:
        return tuple(sorted({rank for pair in self.pairs for rank in pair})) if self.pairs else self.members

    @property
    def blocks(self) -> bool:
        """Whether the call returns only after its peers' calls, as a functional gather along a dim other than 0 does."""
        gathers = self.kind == "all_gather_into_tensor" and self.dim > 0
        return self.style == "sync" or (self.style == "functional" and gathers)

    def sends(self, rank: int) -> list[int]:
        return [receiver for sender, receiver in self.pairs if sender == rank]

    def recvs(self, rank: int) -> list[int]:
        return [sender for sender, receiver in self.pairs if receiver == rank]

    def brought(self, rank: int) -> tuple[int, ...] | None:
        """The shape of the rank's input; None if it has none."""
        rows, columns = self.shape
        many = len(self.members)
        if self.kind in MESSAGES:
            return (len(self.sends(rank)), rows, columns) if self.sends(rank) else None
        if self.kind in ("barrier", *OBJECTS) or (self.kind == "scatter" and rank != self.root):
            return None
        if self.kind in LISTS:
            return (many, rows, columns)
        if self.kind == "reduce_scatter_tensor":
            return (rows, many * columns) if self.dim else (many * rows, columns)
        if self.kind in SPLITS:
            return (sum(self.splits[self.members.index(rank)]), columns)
        return (rows * columns,) if self.kind == "permute" else (rows, columns)  # permute_tensor counts elements

    def gets(self, rank: int) -> bool:
        """Whether the rank has a result that it may read."""
        if self.kind in ("reduce", "gather", "gather_object"):
            return rank == self.root
        return self.kind != "barrier" and not (self.kind in MESSAGES and not self.recvs(rank))

    def channels(self) -> set[object]:
        """Steps that share one must come in the same order on all ranks."""
        if self.kind in MESSAGES:
            return {(self.group, *pair, self.tag) for pair in self.pairs}
        return {self.group}


@dataclass(frozen=True, slots=True)
class Event:
    """One action of a rank: group, launch, wait, mix, local or close; `how` is its variant.

    Programs with a planted fault also have read, write (of a buffer in flight), raise and return.
    """

    what: str
    step: Step | None = None
    how: str = ""

    @property
    def call(self) -> Step:
        """The step, or a step of kind "none"."""
        return self.step or _NO_STEP


_NO_STEP = Step(0, "none", 0, ())
