"""RNG streams of all ranks: ranks that have drawn the same numbers share a generator state.

Every rank starts with the state that a generator has when it is first used in the mode, as each process of a job with
equal seeds does.  While all ranks agree, the generator itself is the one stream; states are saved and loaded only where
streams differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from localtensor.lockstep.values.partition import Array, Partition, by_value, every_rank_alone, everyone


class Stream:
    """One generator on all ranks.  `partition` has a row for each different state; `whole` is the mode's `everyone`."""

    def __init__(self, generator: torch.Generator, whole: Partition) -> None:
        self.generator, self.whole = generator, whole
        self.partition = everyone(whole.world)
        self.states: list[torch.Tensor] = []  # by row; empty while all ranks agree, and the generator holds the state
        self._left = b""  # the generator's state when streams that differ were last saved

    @contextmanager
    def drawing(self, wanted: Partition) -> Iterator[Callable[[int], None]]:
        """While inside, a call with a row of this finer partition loads the state of its ranks into the generator.

        Afterwards those ranks have the generator's new state, and equal states are shared.  After an error all ranks
        have their old states.
        """
        if wanted.rows == 1 and not self.states and (wanted.complete or wanted is self.whole):
            yield lambda row: None  # nothing to load: all ranks agree with the generator
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
        except BaseException:  # why: it is re-raised; after any interrupt the generator is reset
            self.generator.set_state(before[0])
            self._leave()
            raise
        if after:
            self.set_on(np.where(np.isin(wanted.row_of, list(after)), wanted.row_of, -1), after, before)

    def set_on(self, numbers: Array, states: Mapping[int, torch.Tensor], before: Sequence[torch.Tensor] = ()) -> None:
        """Give rank r the state `states[numbers[r]]`, or its old one if the number is -1; equal states are shared."""
        before = before or self.states or [self.generator.get_state()]
        numbers = np.where(numbers >= 0, numbers, -1 - self.partition.row_of)
        states = {-1 - row: state for row, state in enumerate(before)} | dict(states)
        first: dict[bytes, int] = {}
        same = {number: first.setdefault(_state_bytes(state), number) for number, state in states.items()}
        self._set(np.array([same[int(number)] for number in numbers]), states)

    def _set(self, numbers: Array, states: Mapping[int, torch.Tensor]) -> None:
        held = by_value(numbers)
        found = [states[int(numbers[held.ranks(row)[0]])] for row in range(held.rows)]
        self.generator.set_state(found[0])
        self.partition, self.states = held, found if len(found) > 1 else []
        self._leave()

    def _leave(self) -> None:
        self._left = _state_bytes(self.generator.get_state()) if self.states else b""

    def look(self) -> None:
        """Detect that the generator was seeded outside of the mode's functions: then it was on all ranks."""
        if self.states and _state_bytes(self.generator.get_state()) != self._left:
            self.agree()

    def agree(self) -> None:
        """Give all ranks the generator's state."""
        self.partition, self.states = everyone(self.whole.world), []

    def state_on(self, rank: int) -> torch.Tensor:
        """The state of a rank."""
        return self.states[self.partition.row_of[rank]] if self.states else self.generator.get_state()


def _state_bytes(state: torch.Tensor) -> bytes:
    with torch._C._DisableTorchDispatch():  # under the mode, NumPy would get a tensor without memory
        return state.numpy().tobytes()


class Streams:
    """The streams of one mode: of the default generators and of those made by a program."""

    def __init__(self, whole: Partition) -> None:
        self._whole = whole
        self._known: dict[int, Stream] = {}
        self._before: list[tuple[Any, torch.Tensor]] = []  # the default generators, as they were

    def of(self, generator: torch.Generator | None = None) -> Stream:
        """The stream of a generator, by default of the CPU's default generator."""
        generator = torch.default_generator if generator is None else generator
        found = self._known.get(id(generator))
        if found is None:
            found = self._known[id(generator)] = Stream(generator, self._whole)
            if generator is torch.default_generator or generator in torch.cuda.default_generators:
                self._before.append((generator, generator.get_state()))
        elif found.states:
            found.look()
        return found

    def of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stream:
        """The stream of an op: of its generator argument, or of the device on which it draws."""
        device = kwargs.get("device")
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                return self.of(value)
            if device is None and isinstance(value, torch.Tensor):
                device = value.device
        if device is None or torch.device(device).type != "cuda":
            return self.of()
        index = torch.device(device).index
        return self.of(torch.cuda.default_generators[torch.cuda.current_device() if index is None else index])

    def agree(self) -> None:
        """Note that the default generators were seeded alike on all ranks."""
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            self.of(generator).agree()

    def seed(self, by_rank: Array) -> None:
        """Seed the default generators of rank r with `by_rank[r]`."""
        seeds, places = np.unique(by_rank, return_inverse=True)
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            make = torch.Generator(generator.device)
            states = {place: make.manual_seed(int(seed)).get_state() for place, seed in enumerate(seeds)}
            self.of(generator).set_on(places, states)

    def close(self) -> None:
        """Restore the default generators; any other generator gets the state of the first rank."""
        for stream in self._known.values():
            if stream.states:
                stream.generator.set_state(stream.state_on(int(np.flatnonzero(self._whole.row_of >= 0)[0])))
        for generator, state in self._before:
            generator.set_state(state)
        self._known, self._before = {}, []

    @contextmanager
    def by_rank(self) -> Iterator[Callable[[int], None]]:
        """While inside, a call with a rank loads that rank's state into the default generator."""
        with self.of().drawing(every_rank_alone(self._whole.world)) as at:
            yield at
