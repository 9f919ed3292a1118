"""The random streams of all ranks: ranks that have drawn the same share a generator's state.

Every rank starts with the state that a generator has when it is first used in the mode, as each process of a job that
seeds alike does.  As long as all ranks agree, the real generator is the one stream of all; states are saved and
loaded only where streams have parted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from localtensor.lockstep.values.partition import Partition, by_value, each_alone, everyone


class Stream:
    """One generator, on all ranks.  `partition` has a row for each different state; `whole` is of the mode's ranks."""

    def __init__(self, generator: Any, whole: Partition) -> None:
        self.generator, self.whole = generator, whole
        self.partition = everyone(whole.world)
        self.states: list[torch.Tensor] = []  # by row; empty while all ranks agree, and the generator holds it
        self._left = b""  # what the generator held when it was last left, its streams parted

    @contextmanager
    def drawing(self, wanted: Partition) -> Iterator[Callable[[int], None]]:
        """While inside, a call with a row of this finer partition puts the generator where its ranks have it.

        Afterwards they have what it was left with, and who has the same state shares it.  After an error, all have
        what they had.
        """
        if wanted.rows == 1 and not self.states and (wanted.complete or wanted is self.whole):
            yield _stay
            return
        before = self.states or [self.generator.get_state()]
        after: dict[int, torch.Tensor] = {}
        last: list[int] = []

        def at(row: int | None) -> None:
            if last:
                after[last.pop()] = self.generator.get_state()
            if row is not None:
                self.generator.set_state(before[self.partition.row_of[wanted.ranks(row)[0]]])
                last.append(row)

        try:
            yield at
            at(None)
        except BaseException:  # why: whatever interrupts a draw, the generator is not left in the middle of it
            self.generator.set_state(before[0])
            self._leave()
            raise
        if after:
            self.set_on(np.where(np.isin(wanted.row_of, list(after)), wanted.row_of, -1), after, before)

    def set_on(self, numbers: Any, states: Mapping[int, torch.Tensor], before: Sequence[torch.Tensor] = ()) -> None:
        """Each rank has the state of its number, or that which it had before if it is -1; equal states are one."""
        before = before or self.states or [self.generator.get_state()]
        numbers = np.where(numbers >= 0, numbers, -1 - self.partition.row_of)
        states = {-1 - row: state for row, state in enumerate(before)} | dict(states)
        first: dict[bytes, int] = {}
        same = {number: first.setdefault(_bits(state), number) for number, state in states.items()}
        self._set(np.array([same[int(number)] for number in numbers]), states)

    def _set(self, numbers: Any, states: Mapping[int, torch.Tensor]) -> None:
        held = by_value(numbers)
        found = [states[int(numbers[held.ranks(row)[0]])] for row in range(held.rows)]
        self.generator.set_state(found[0])
        self.partition, self.states = held, found if len(found) > 1 else []
        self._leave()

    def _leave(self) -> None:
        self._left = _bits(self.generator.get_state()) if self.states else b""

    def look(self) -> None:
        """Whoever has seeded the generator behind our back has seeded it on all ranks."""
        if self.states and _bits(self.generator.get_state()) != self._left:
            self.agree()

    def agree(self) -> None:
        """All ranks have what the generator holds."""
        self.partition, self.states = everyone(self.whole.world), []

    def state_on(self, rank: int) -> torch.Tensor:
        """The state that a rank has."""
        found: torch.Tensor = self.states[self.partition.row_of[rank]] if self.states else self.generator.get_state()
        return found


def _stay(row: int) -> None:
    """All ranks agree: the generator is where they have it."""


def _bits(state: torch.Tensor) -> bytes:
    with torch._C._DisableTorchDispatch():  # under the mode, NumPy would be shown a tensor without memory
        return state.numpy().tobytes()


class Streams:
    """The streams of one mode: of the default generators, and of those that a program makes."""

    def __init__(self, whole: Partition) -> None:
        self._whole = whole
        self._known: dict[int, Stream] = {}
        self._before: list[tuple[Any, torch.Tensor]] = []  # the default generators, as they were

    def of(self, generator: Any = None) -> Stream:
        """A generator's stream; without one, that of the CPU's default generator."""
        generator = torch.default_generator if generator is None else generator
        found = self._known.get(id(generator))
        if found is None:
            found = self._known[id(generator)] = Stream(generator, self._whole)
            if generator is torch.default_generator or generator in torch.cuda.default_generators:
                self._before.append((generator, generator.get_state()))
        elif found.states:
            found.look()
        return found

    def of_call(self, args: Any, kwargs: Mapping[str, Any]) -> Stream:
        """The stream that an op draws from: of the generator that it is given, or of the device on which it draws."""
        device = kwargs.get("device")
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                return self.of(value)
            if device is None and isinstance(value, torch.Tensor):
                device = value.device
        if device is None or torch.device(device).type != "cuda":
            return self.of()
        device = torch.device(device)
        return self.of(
            torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        )

    def agree(self) -> None:
        """All ranks have seeded the default generators alike."""
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            self.of(generator).agree()

    def seed(self, by_rank: Any) -> None:
        """Each rank has seeded the default generators with its number."""
        seeds, places = np.unique(by_rank, return_inverse=True)
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            make = torch.Generator(generator.device)
            states = {place: make.manual_seed(int(seed)).get_state() for place, seed in enumerate(seeds)}
            self.of(generator).set_on(places, states)

    def close(self) -> None:
        """The default generators are as they were; any other is where the first rank has it."""
        for stream in self._known.values():
            if stream.states:
                stream.generator.set_state(stream.state_on(int(np.flatnonzero(self._whole.row_of >= 0)[0])))
        for generator, state in self._before:
            generator.set_state(state)
        self._known, self._before = {}, []

    @contextmanager
    def by_rank(self) -> Iterator[Callable[[int], None]]:
        """While inside, a call with a rank puts the default generator where that rank has it."""
        with self.of().drawing(each_alone(self._whole.world)) as at:
            yield at
