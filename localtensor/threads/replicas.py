"""Replicas that diverge: parameters that ranks take for copies of each other, and that differ.

Ranks that all_reduce the gradients of parameters, and then step, treat the parameters as replicas.  The call pairs them: no
name, order or rank is guessed, so shards, experts and stages, whose gradients never meet, are not compared.  Of
DistributedDataParallel, which copies sums to gradients out of sight, the parameters of one module are paired.
"""

import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import code_that_called_us, place_of_frame
from localtensor._util.events import Place
from localtensor._util.patching import wrapped
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.errors import RanksDisagree
from localtensor.layout.spec import shape_text
from localtensor.threads.buffer_watch import checksum
from localtensor.threads.simulation import Simulation

REDUCING = frozenset({"all_reduce", "all_reduce_coalesced"})  # the calls by which ranks average gradients
MODES = (None, "check", "ignore")
MOST_OPEN = 1 << 14  # comparisons that wait for a rank; the oldest are dropped
MOST_REDUCED = 1 << 10  # notes of a rank, from which on those of storages that are gone are dropped
# The backward passes after which all parameters are compared; between them it is one, of the first calls after each third.
# Odd numbers meet each of two optimizers that take turns.
FIRST, THEN_EACH, ONE_EACH, FEW = 8, 17, 3, 2
SHOWN = 4  # elements in a message
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


class _Sum(NamedTuple):
    """The elements of a storage that hold the sum of a call's tensors: from `first` up to `end`."""

    storage: StorageWeakRef  # a weak reference keeps another storage from getting the same number
    first: int
    end: int
    backward: int  # the number of the rank's backward passes when it was written
    group: Group
    key: tuple[int, int]  # the call's number on its group, and the buffer's in the call


class _Copy(NamedTuple):
    """A rank's parameter at a step: its checksum, and what a message shows of it.  0 is the sum of a gradient of no interest."""

    sum: int
    gradient: int
    shape: torch.Size
    dtype: torch.dtype
    head: bytes
    what: str
    place: Place | None

    def text(self) -> str:
        values = torch.frombuffer(bytearray(self.head), dtype=self.dtype).tolist() if self.head else []
        dots = ", ..." if self.shape.numel() > len(values) else ""
        return f"{shape_text(self.shape, self.dtype)} {', '.join(f'{value:.6g}' for value in values)}{dots}"


class _Rank:
    """What the watch knows of one rank."""

    def __init__(self) -> None:
        self.sums: dict[int, list[_Sum]] = {}  # by storage
        self.most = MOST_REDUCED
        self.backward = 0  # backward passes so far
        self.few: int | None = None  # how many more calls are noted in this one; None if all are
        self.compares = True  # whether anything is compared after this one
        self.compared: set[tuple[Any, ...]] = set()  # since the last backward pass
        self.modules: list[ReferenceType[DistributedDataParallel]] = []
        self.by_engine: dict[tuple[int, ...], tuple[int, int]] = {}  # ranks -> backward, number of the last sum by C++


class _Pair(NamedTuple):
    """A parameter that has counterparts on other ranks, which have the same key."""

    key: tuple[Any, ...]
    ranks: tuple[int, ...]
    number: int  # of the optimizer's parameters
    parameter: Tensor
    gradient: Tensor | None  # if it has to be equal on all ranks for an error


class ReplicaWatch:
    """The parameters of one run that are compared between ranks.

    `every`: all parameters of all optimizers, by their order, after each step; else those whose gradients one call has
    all_reduced on all ranks of its group, before a step.  A sum counts until the rank's next backward pass.
    """

    def __init__(self, simulation: Simulation, *, every: bool) -> None:
        self._simulation, self._every = simulation, every
        self.stepping = every  # whether an optimizer has made a step: until then, no call is noted
        self._ranks = [_Rank() for _ in range(simulation.ranks)]
        self._open: dict[tuple[Any, ...], dict[int, _Copy]] = {}
        self._steps: list[dict[Optimizer, tuple[int, int]]] = [{} for _ in range(simulation.ranks)]

    def begin_backward(self) -> None:
        """A rank begins a backward pass: what was summed before is no gradient of it."""
        rank = self._ranks[self._simulation.rank()]
        rank.backward += 1
        whole = rank.backward <= FIRST or rank.backward % THEN_EACH == 0
        rank.compares = whole or rank.backward % ONE_EACH == 0
        rank.few = None if whole else FEW if rank.compares else 0
        rank.compared.clear()

    def register(self, module: DistributedDataParallel) -> None:
        """A rank makes this DistributedDataParallel."""
        self._ranks[self._simulation.rank()].modules.append(ref(module))

    def note(self, part: Contribution, buffers: Sequence[Tensor]) -> None:
        """A call has written the sum of the ranks' tensors to these buffers, which may be gradients."""
        rank = self._ranks[part.rank]
        if rank.few is not None:
            if not rank.few:
                return
            rank.few -= 1
        if rank.modules and code_that_called_us() is _BACKWARD:  # torch's C++ has, and no hook in Python
            rank.by_engine[part.group.ranks] = rank.backward, part.number
        if len(rank.sums) >= rank.most:
            rank.sums = {key: sums for key, sums in rank.sums.items() if not sums[0].storage.expired()}
            rank.most = max(MOST_REDUCED, 2 * len(rank.sums))
        for index, buffer in enumerate(buffers):
            span = _span(buffer)
            if span is None:
                continue
            first, end = span
            storage = buffer.untyped_storage()
            one = _Sum(StorageWeakRef(storage), first, end, rank.backward, part.group, (part.number, index))
            others = rank.sums.get(storage._cdata)
            if others is not None:  # a bucket that is reduced in parts
                now = rank.backward
                others = [x for x in others if x.backward == now and (x.end <= first or end <= x.first)]
            rank.sums[storage._cdata] = [*others, one] if others else [one]

    def before_step(self, optimizer: Optimizer) -> None:
        """A rank is about to make a step."""
        self.stepping = True
        if self._every:
            return
        number = self._simulation.rank()
        rank = self._ranks[number]
        if not rank.compares:
            return
        place = None
        for pair in itertools.islice(self._pairs(optimizer, rank), None if rank.few is None else 1):
            rank.compared.add(pair.key)
            place = place or place_of_frame(sys._getframe(1))
            copy = _copy(optimizer, pair.number, pair.parameter, pair.gradient, place)
            self._compare(pair.key, pair.ranks, number, copy)

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
            self._compare(key, range(self._simulation.ranks), rank, _copy(optimizer, number, parameter, None, place))

    def _pairs(self, optimizer: Optimizer, rank: _Rank) -> Iterator[_Pair]:
        """The optimizer's parameters whose gradients are sums now, and have not been compared since."""
        wrapped_ones = self._in_modules(rank)
        if not rank.sums and not wrapped_ones:
            return
        seen: set[tuple[Any, ...]] = set()
        for number, parameter in enumerate(_parameters(optimizer)):
            gradient = parameter.grad
            if type(gradient) is not Tensor:
                continue
            found = _sum_of(gradient, rank)
            if found is not None:
                key = (found.group, *found.key, gradient.storage_offset() - found.first, gradient.numel())
                pair = _Pair(key, found.group.ranks, number, parameter, None)
            elif id(parameter) in wrapped_ones:
                key, ranks = wrapped_ones[id(parameter)]
                pair = _Pair(key, ranks, number, parameter, gradient)
            else:
                continue
            # Two parameters may have one gradient: they are no pair.
            if pair.key not in rank.compared and pair.key not in seen:
                seen.add(pair.key)
                yield pair

    def _in_modules(self, rank: _Rank) -> dict[int, tuple[tuple[Any, ...], tuple[int, ...]]]:
        """Key and ranks of each parameter, by its id, that is in a module whose C++ code has summed gradients now."""
        found: dict[int, tuple[tuple[Any, ...], tuple[int, ...]]] = {}
        for which, reference in enumerate(rank.modules):
            module = reference()
            if module is None:
                continue
            ranks = tuple(torch.distributed.get_process_group_ranks(module.process_group))
            backward, number = rank.by_engine.get(ranks, (-1, 0))
            if backward == rank.backward:
                few = None if rank.few is None else FEW
                for index, parameter in enumerate(itertools.islice(module.parameters(), few)):
                    found[id(parameter)] = ("module", ranks, number, which, index), ranks
        return found

    def _compare(self, key: tuple[Any, ...], ranks: Sequence[int], rank: int, copy: _Copy | None) -> None:
        """Compare the copies once all ranks have one."""
        if copy is None:
            return
        copies = self._open.setdefault(key, {})
        copies[rank] = copy
        if len(copies) == len(ranks):
            del self._open[key]
            differ = len({(one.sum, one.shape, one.dtype) for one in copies.values()}) > 1
            if differ and len({one.gradient for one in copies.values()}) == 1:
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


def _module_inside(module: nn.Module, name: str, submodule: object) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        watch = _watch()
        if watch is not None:
            watch.register(module)


def _backward(original: Any, *args: object, **kwargs: object) -> object:
    watch = _watch() if kwargs.get("accumulate_grad") else None
    if watch is not None:
        watch.begin_backward()
    return original(*args, **kwargs)


@contextmanager
def training_hooked() -> Iterator[None]:
    """Inside the block the watch of the run sees each step of each optimizer of its ranks, and each backward pass."""
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(_before_step).remove)
        stack.callback(register_optimizer_step_post_hook(_after_step).remove)
        stack.callback(register_module_module_registration_hook(_module_inside).remove)
        stack.enter_context(wrapped(torch.autograd, "_engine_run_backward", _backward))
        yield


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _span(x: Tensor) -> tuple[int, int] | None:
    """The elements of the storage from the first of this tensor up to its end; None if some of them are not in it."""
    if x.layout != torch.strided:
        return None
    first, count = int(x.storage_offset()), x.numel()
    if not x.is_contiguous() and count != 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())):
        return None
    return first, first + count


def _sum_of(gradient: Tensor, rank: _Rank) -> _Sum | None:
    """The sum that this gradient is, or is part of."""
    sums = rank.sums.get(gradient.untyped_storage()._cdata) if rank.sums and gradient.layout == torch.strided else None
    span = _span(gradient) if sums else None
    if not sums or span is None:
        return None
    first, end = span
    return next((x for x in sums if x.backward == rank.backward and x.first <= first and end <= x.end), None)


def _copy(
    optimizer: Optimizer, number: int, parameter: Tensor, gradient: Tensor | None, place: Place | None
) -> _Copy | None:
    """What is compared of a parameter; None for a tensor subclass, and for memory that cannot be read here."""
    if type(parameter) not in (Tensor, nn.Parameter):
        return None
    value = checksum(parameter)  # reads memory: no mode and no profile of the user's sees it
    summed = 0 if gradient is None else checksum(gradient)
    if value is None or summed is None:
        return None
    size = min(parameter.numel(), SHOWN) * parameter.element_size()
    head = bytes((ctypes.c_char * size).from_address(parameter.data_ptr()))
    what = f"parameter {number} of {type(optimizer).__name__}"
    return _Copy(value, summed, parameter.shape, parameter.dtype, head, what, place)
