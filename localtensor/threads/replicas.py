"""Replicas that diverge: parameters that ranks take for copies of each other, and that differ.

Ranks that all_reduce the gradients of parameters, and then step, treat the parameters as replicas.  The call pairs them: no
name, order or rank is guessed, so shards, experts and stages, whose gradients never meet, are not compared.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.errors import RanksDisagree
from localtensor.layout.spec import shape_text
from localtensor.threads.buffer_watch import checksum
from localtensor.threads.simulation import Simulation

REDUCING = frozenset({"all_reduce", "all_reduce_coalesced"})  # the calls by which ranks average gradients
MODES = (None, "check", "ignore")
MOST_OPEN = 1 << 14  # comparisons that wait for a rank; the oldest are dropped
SHOWN = 4  # elements in a message


class _Copy(NamedTuple):
    """A rank's parameter at a step: its checksum, and what a message shows of it."""

    sum: int
    shape: torch.Size
    dtype: torch.dtype
    head: bytes
    what: str
    place: Place | None

    def text(self) -> str:
        values = torch.frombuffer(bytearray(self.head), dtype=self.dtype).tolist() if self.head else []
        dots = ", ..." if self.shape.numel() > len(values) else ""
        return f"{shape_text(self.shape, self.dtype)} {', '.join(f'{value:.6g}' for value in values)}{dots}"


class ReplicaWatch:
    """The parameters of one run that are compared between ranks.

    `every`: all parameters of all optimizers, by their order, after each step; else those whose gradients one call has
    all_reduced on all ranks of its group, before each step.
    """

    def __init__(self, simulation: Simulation, *, every: bool) -> None:
        self._simulation, self._every = simulation, every
        self.stepping = every  # whether an optimizer has made a step: until then, no call is noted
        self._reduced: list[dict[int, tuple[StorageWeakRef, Group, int]]] = [{} for _ in range(simulation.ranks)]
        self._open: dict[tuple[Any, ...], dict[int, _Copy]] = {}
        self._steps: list[dict[Optimizer, tuple[int, int]]] = [{} for _ in range(simulation.ranks)]

    def note(self, part: Contribution, buffers: Sequence[Tensor]) -> None:
        """A call has written the sum of the ranks' tensors to these buffers, which may be gradients."""
        held = self._reduced[part.rank]
        if len(held) >= 1024:
            for gone in [key for key, (ref, _, _) in held.items() if ref.expired()]:
                del held[gone]
        for buffer in buffers:
            if buffer.layout == torch.strided:
                storage = buffer.untyped_storage()
                # The weak reference keeps another storage from getting the same number.
                held[storage._cdata] = (StorageWeakRef(storage), part.group, part.number)

    def before_step(self, optimizer: Optimizer) -> None:
        """A rank is about to make a step."""
        if self._every:
            return
        rank, self.stepping = self._simulation.rank(), True
        held, seen = self._reduced[rank], set()
        place = place_of_frame(sys._getframe(1)) if held else None
        for number, parameter in enumerate(_parameters(optimizer)):
            gradient = parameter.grad
            if not held or gradient is None or type(gradient) is not Tensor:
                continue
            storage = gradient.untyped_storage()._cdata
            found = held.get(storage)
            if found is not None:
                seen.add(storage)
                key = (found[1], found[2], gradient.storage_offset(), gradient.numel())
                self._compare(key, found[1].ranks, rank, _copy(optimizer, number, parameter, place))
        for storage in seen:
            del held[storage]

    def after_step(self, optimizer: Optimizer) -> None:
        """A rank has made a step."""
        if not self._every:
            return
        rank = self._simulation.rank()
        steps, place = self._steps[rank], place_of_frame(sys._getframe(1))
        which, step = steps.get(optimizer, (len(steps), 0))
        steps[optimizer] = (which, step + 1)
        for number, parameter in enumerate(_parameters(optimizer)):
            key = (which, step, number)
            self._compare(key, range(self._simulation.ranks), rank, _copy(optimizer, number, parameter, place))

    def _compare(self, key: tuple[Any, ...], ranks: Sequence[int], rank: int, copy: _Copy | None) -> None:
        """Compare the copies once all ranks have one."""
        if copy is None:
            return
        copies = self._open.setdefault(key, {})
        copies[rank] = copy
        if len(copies) == len(ranks):
            del self._open[key]
            if len({(one.sum, one.shape, one.dtype) for one in copies.values()}) > 1:
                self._report(copies)
        elif len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _report(self, copies: dict[int, _Copy]) -> None:
        order = sorted(copies)
        detail = "and their gradients are averaged" if not self._every else ""
        texts = {rank: copies[rank].text() for rank in order}
        if len(set(texts.values())) == 1:  # they differ further behind
            texts = {rank: f"{text} (checksum {copies[rank].sum:x})" for rank, text in texts.items()}
        places = {rank: copies[rank].place for rank in order}
        self._simulation.fail(RanksDisagree(copies[order[0]].what, texts, places, detail, call="optimizer.step"))


def _watch() -> ReplicaWatch | None:
    simulation = simulation_of_this_rank()
    return None if simulation is None else simulation.kernels.replicas


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    watch = _watch()
    if watch is not None:
        watch.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    watch = _watch()
    if watch is not None:
        watch.after_step(optimizer)


@contextmanager
def steps_of_optimizers_hooked() -> Iterator[None]:
    """Inside the block, torch calls the watch of the run around each step of each optimizer of its ranks."""
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(_before_step).remove)
        stack.callback(register_optimizer_step_post_hook(_after_step).remove)
        yield


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _copy(optimizer: Optimizer, number: int, parameter: Tensor, place: Place | None) -> _Copy | None:
    """What is compared of a parameter; None for a tensor subclass, and for memory that cannot be read here."""
    if type(parameter) not in (Tensor, torch.nn.Parameter):
        return None
    value = checksum(parameter)  # reads memory: no mode and no profile of the user's sees it
    if value is None:
        return None
    size = min(parameter.numel(), SHOWN) * parameter.element_size()
    head = bytes((ctypes.c_char * size).from_address(parameter.data_ptr()))
    what = f"parameter {number} of {type(optimizer).__name__}"
    return _Copy(value, parameter.shape, parameter.dtype, head, what, place)
