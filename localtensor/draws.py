"""The random streams of all ranks: ranks that have drawn the same share a generator's state.

Every rank starts with the state that the generator has when the mode is entered, as each process of a job that seeds
alike does.  As long as all ranks agree, the real generator is the one stream of all; a state is saved and loaded
only where streams have parted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from localtensor.folding import Partition, by_value, everyone


class Stream:
    """One generator, on all ranks.  `partition` has a row for each different state."""

    def __init__(self, generator: Any, world: int) -> None:
        self.generator = generator
        self.partition = everyone(world)
        self.states: list[torch.Tensor] = []  # by row; empty while all ranks agree, and the generator holds it
        self._next: dict[int, torch.Tensor] = {}

    @contextmanager
    def at(self, wanted: Partition, row: int) -> Iterator[None]:
        """While inside, the generator is where the ranks of this row of a finer partition have it."""
        if wanted.rows == 1 and not self.states:
            yield
            return
        if not self.states:
            self.states = [self.generator.get_state()]
        rank = wanted.ranks(row)[0]
        self.generator.set_state(self.states[self.partition.row_of[rank]])
        yield
        self._next[row] = self.generator.get_state()

    def settle(self, wanted: Partition) -> None:
        """The draws of all rows of this partition are over: who has the same state now shares it."""
        if not self._next:
            return
        states, self._next = self._next, {}
        states.update({wanted.rows + row: state for row, state in enumerate(self.states)})  # of ranks that drew nothing
        self._share(np.where(wanted.row_of >= 0, wanted.row_of, wanted.rows + self.partition.row_of), states)

    def set(self, numbers: Any, states: Mapping[int, torch.Tensor]) -> None:
        """Each rank has the state of its number."""
        held = by_value(numbers)
        found = [states[int(numbers[held.ranks(row)[0]])] for row in range(held.rows)]
        if held.uniform:
            self.generator.set_state(found[0])
            found = []
        self.partition, self.states = held, found

    def part(self, rank: int, state: torch.Tensor, others: torch.Tensor) -> None:
        """One rank has drawn by itself, the others, while all agreed, have not."""
        states = dict(enumerate(self.states or [others])) | {-2: state}
        numbers = np.array(self.partition.row_of)
        numbers[rank] = -2
        self._share(numbers, states)

    def _share(self, numbers: Any, states: dict[int, torch.Tensor]) -> None:
        first: dict[bytes, int] = {}
        same = {n: first.setdefault(states[n].numpy().tobytes(), place) for place, n in enumerate(sorted(states))}
        self.set(np.array([same[int(n)] for n in numbers]), {same[n]: state for n, state in states.items()})

    def forget(self) -> None:
        """The generator was seeded anew: all ranks have its state."""
        self.partition, self.states = everyone(self.partition.world), []

    def state_on(self, rank: int) -> torch.Tensor:
        """The state that a rank has."""
        return self.states[self.partition.row_of[rank]] if self.states else self.generator.get_state()


class Streams:
    """The streams of one mode: of the default generators, and of those that a program makes."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._known: dict[int, Stream] = {}

    def of(self, generator: Any = None) -> Stream:
        generator = torch.default_generator if generator is None else generator
        found = self._known.get(id(generator))
        if found is None:
            found = self._known[id(generator)] = Stream(generator, self.world)
        return found

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """While inside, the default generator is that rank's."""
        stream = self.of()
        before = stream.state_on(rank)
        stream.generator.set_state(before)
        try:
            yield
        finally:
            after = stream.generator.get_state()
            if stream.states or not torch.equal(before, after):
                stream.part(rank, after, before)
