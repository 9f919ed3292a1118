"""Runs one call of an op: on the host, on copies of its tensors on another device, or on many copies there at once.

A GPU that several processes share serves them in turn, and a call whose result is read at once waits for its turn: a sweep
of thousands of small calls then takes ten times as long as on the host.  So `run_in_batches` does the work twice: the host's kernels
say which calls there are, and those run on the device without waiting; then the device's results take their place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from strategies.model.arguments import argument_names
from strategies.model.rule import Call, Sample, flat_results, overload, written_leaves

REJECTIONS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AssertionError, KeyError)
"""What an op raises for arguments that it rejects; any other exception is a crash."""
_READ_BY_HOST = frozenset({"scalars", "philox_seed", "philox_offset"})
"""Arguments that stay in memory of the host: the numbers of foreach ops, and the generator's state of efficient attention
(torch 2.11, attention_backward.cu, where no graph is captured); that of flash attention is the device's."""
MOST_WAITING, MOST_BYTES = 512, 64 << 20
"""Calls, and bytes of their results, that wait on the device for their way home."""

_BAD_VALUES = re.compile(r"out of (range|bounds)|between 0 and 1|>= ?0|probability|probabilities", re.IGNORECASE)
"""Words of what the host's kernels say of an index or a probability, which a GPU's kernels assert.  Tried on torch 2.11 and 2.13."""

Outcome = tuple[Any, list[Any]]
"""The raw result of a call, and the flat list of its results and of the arguments that it wrote to."""
_Key = tuple[str, bytes]
_T = TypeVar("_T")

_KERNELS: ContextVar[str] = ContextVar("kernels", default="cpu")
_BATCH: ContextVar[_Batch | None] = ContextVar("batch", default=None)


@contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Inside the block `run_call` runs ops on copies of their tensors on that device, and gives results in memory of the host:
    all that is computed around an op stays there, where the many small steps of a test cost less."""
    token = _KERNELS.set(device)
    try:
        yield
    finally:
        _KERNELS.reset(token)


def kernel_device() -> str:
    """The device of `kernels_on`."""
    return _KERNELS.get()


def run_in_batches(work: Callable[[Callable[[int], None]], _T], note: Callable[[int], None]) -> _T:
    """What `work(note)` returns inside `kernels_on`, with few waits for the device.

    `work` runs twice, and must do the same both times but for what ops return.  `note` is called with the number of each step
    before it begins; what a step has sent to the device is done when the next one is noted.
    """
    if _KERNELS.get() == "cpu":
        return work(note)
    batch = _Batch()
    token = _BATCH.set(batch)

    def noted(step: int) -> None:
        batch.fetch()
        note(step)

    try:
        work(noted)
        batch.fetch()
        batch.sends = False
        return work(noted)
    finally:
        _BATCH.reset(token)


def run_call(call: Call, tensors: Sequence[Tensor], *, mutates: bool) -> Outcome:
    """The op's raw result, and the flat list of its results and of the arguments that it wrote to without returning them.

    With `mutates`, the op gets copies of the tensors; so it does inside `kernels_on` another device.  Raises what the op raises.
    """
    if _KERNELS.get() == "cpu" or type(call) is not Call:
        return _run_here(call, tensors, mutates)
    batch = _BATCH.get()
    run = batch.run if batch else _run_there
    return run(call, tensors, mutates)


def _run_here(call: Call, tensors: Sequence[Tensor], mutates: bool) -> Outcome:
    given = [t.clone() for t in tensors] if mutates else tensors
    raw = call(given)
    return raw, [*flat_results(raw), *(given[leaf] for leaf in written_leaves(call))]


def _run_there(call: Call, tensors: Sequence[Tensor], mutates: bool) -> Outcome:
    values, spec = tree_flatten(_sent(call, tensors, mutates))
    raw, flat = tree_unflatten(_brought_home(values), spec)
    return raw, flat


def _sent(call: Call, tensors: Sequence[Tensor], mutates: bool, *, wait: bool = True) -> Outcome:
    """The outcome in memory of the device, which may still be at work on it unless the host is to `wait`."""
    device = _KERNELS.get()
    read = _READ_BY_HOST & {*call.named()} if "philox_seed" not in call.named() or "efficient" in call.op else ()
    names = argument_names(Sample(call, tuple(tensors), "")) if read else ()
    on_host = {i for i, name in enumerate(names) if name in read}
    given = [x.clone() for x in tensors] if mutates else tensors  # a clone of an expanded tensor is dense
    there = [x.clone() if i in on_host else copied_to(x, device, wait=wait) for i, x in enumerate(given)]
    raw = placed_call(call, device)(there)
    return raw, [*flat_results(raw), *(there[leaf] for leaf in written_leaves(call))]


def copied_to(x: Tensor, device: str, *, wait: bool = True) -> Tensor:
    """A copy on that device with the same strides, also where elements overlap or have gaps."""
    if not _has_gaps(x):
        return x.to(device, copy=True, non_blocking=not wait)
    return _memory(x).to(device, copy=True, non_blocking=not wait).as_strided(x.shape, x.stride())


def _has_gaps(x: Tensor) -> bool:
    return bool(
        x.layout == torch.strided and not x.is_contiguous() and not x.is_conj() and not x.is_neg() and x.numel()
    )


def _memory(x: Tensor) -> Tensor:
    """The elements of a tensor in the order of its memory, those in its gaps, too."""
    reach = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((reach,), (1,), x.storage_offset())


def placed_call(call: Call, device: str) -> Call:
    """The call with that device where it names one: its sample was made on the CPU."""

    def placed(value: object) -> object:
        return torch.device(device) if isinstance(value, torch.device) and value.type in ("cpu", "cuda") else value

    return Call(call.op, tuple(map(placed, call.args)), tuple((name, placed(v)) for name, v in call.kwargs))


def _is_plain(x: Tensor) -> bool:
    """Whether its memory, dtype and strides are all that there is to it."""
    return x.layout == torch.strided and not x.is_conj() and not x.is_neg() and not x.is_quantized


@dataclass(slots=True)
class _Batch:
    """Outcomes of calls on the device by what they are called with.  While it `sends`, the host's own are given instead."""

    sends: bool = True
    outcomes: dict[_Key, Outcome | Exception] = field(default_factory=dict)
    waiting: dict[_Key, Outcome] = field(default_factory=dict)
    bytes: int = 0
    texts: dict[int, tuple[Call, str]] = field(default_factory=dict)

    def run(self, call: Call, tensors: Sequence[Tensor], mutates: bool) -> Outcome:
        key = self._key(call, tensors, mutates) if all(map(_is_plain, tensors)) else None
        if key is None:
            return _run_there(call, tensors, mutates)
        if not self.sends:
            known = self.outcomes.get(key)
            if known is None:
                return _run_there(call, tensors, mutates)
            if isinstance(known, Exception):
                raise known.with_traceback(None)
            return known[0], list(known[1])
        try:
            here = self._run_on_host(call, tensors, mutates)
        except REJECTIONS as error:
            if _BAD_VALUES.search(str(error)):  # a check on the device would end its service to this process
                self.outcomes[key] = error.with_traceback(None)
                raise
            self._send(key, call, tensors, mutates)
            self.fetch()  # it may have no kernel here: what the device gives says how the work goes on
            known = self.outcomes.get(key)
            if known is None or isinstance(known, Exception):
                raise
            return known[0], list(known[1])
        self._send(key, call, tensors, mutates)
        return here

    @staticmethod
    def _run_on_host(call: Call, tensors: Sequence[Tensor], mutates: bool) -> Outcome:
        writes = overload(call.op)._schema.is_mutable or written_leaves(call)
        given = (
            [copied_to(x, "cpu") for x in tensors] if writes and not mutates else tensors
        )  # the device gets them, too
        return _run_here(call, given, mutates)

    def _key(self, call: Call, tensors: Sequence[Tensor], mutates: bool) -> _Key:
        if id(call) not in self.texts:
            self.texts[id(call)] = call, repr(call)  # the call is kept, so that no other has its id
        digest = hashlib.blake2b(digest_size=16)
        for x in tensors:
            digest.update(repr((tuple(x.shape), x.stride(), x.dtype)).encode())
            digest.update(_memory(x).view(torch.uint8).numpy().data)
        return f"{self.texts[id(call)][1]} {mutates}", digest.digest()

    def _send(self, key: _Key, call: Call, tensors: Sequence[Tensor], mutates: bool) -> None:
        if key in self.outcomes or key in self.waiting:
            return
        try:
            raw, flat = _sent(call, tensors, mutates, wait=False)
        except REJECTIONS as error:
            self.outcomes[key] = error.with_traceback(None)  # its frames hold tensors
            return
        self.waiting[key] = raw, flat
        self.bytes += sum(x.nbytes for x in tree_flatten((raw, flat))[0] if isinstance(x, Tensor))
        if len(self.waiting) >= MOST_WAITING or self.bytes >= MOST_BYTES:
            self.fetch()

    def fetch(self) -> None:
        """Wait for what was sent, and bring it home in one copy.  What a lost GPU does not give is forgotten."""
        waiting, self.waiting, self.bytes = self.waiting, {}, 0
        values, spec = tree_flatten(waiting)
        try:
            self.outcomes |= tree_unflatten(_brought_home(values), spec)
        except RuntimeError:  # of the device: whoever notes the next step finds it lost
            return


def _brought_home(values: Sequence[Any]) -> list[Any]:
    """The same values with copies of their tensors in memory of the host, of the same strides; one tensor twice becomes one."""
    tensors = {id(x): x for x in values if isinstance(x, Tensor)}
    made = {key: copied_to(x, "cpu") for key, x in tensors.items() if not _is_plain(x)}
    for device in {x.device for x in tensors.values()}:  # one copy from each
        plain = [x for key, x in tensors.items() if key not in made and x.device == device]
        parts = [_memory(x).view(torch.uint8) for x in plain]
        pieces = torch.cat(parts).cpu().split([len(part) for part in parts]) if parts else ()
        for x, piece in zip(plain, pieces, strict=True):
            made[id(x)] = piece.clone().view(x.dtype).as_strided(x.shape, x.stride())
    return [made[id(x)] if isinstance(x, Tensor) else x for x in values]
