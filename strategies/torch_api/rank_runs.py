"""Work by DTensor on all ranks of a mesh: in lockstep, on rank threads, on real processes.

What each rank does is the caller's; here is who runs it, for how long, and why ranks did not come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import localtensor as lt
from localtensor._util import Died, Outcome, Raised, Returned, Waiting, pickling
from localtensor.errors import LocalTensorError, in_a_line
from localtensor.processes import Pool
from strategies.torch_api.mesh_and_caches import forget, remembering

SECONDS = 60.0
"""Time limit of a run on rank threads."""
SECONDS_ON_PROCESSES = 20.0
PATIENCE = 3.0
"""How many times as long it has once more, where ranks were waiting when the time was up: a busy machine is slow, and
only a rank that waits however long it is given is a finding."""
REAL = {"nccl": "cpu:gloo,cuda:nccl"}
"""What a backend's name stands for here: ranks tell each other who raised by tensors on the CPU."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """What all ranks of a mesh do together, and the verdict on what each of them gives.

    The verdict has what ranks gave, by rank, and what stopped the ranks, or "": then some gave nothing.
    """

    ranks: int
    mesh: tuple[Any, ...]
    """What makes the mesh, and its arguments: works that have the same ones share it."""
    in_lockstep: Callable[[DeviceMesh], Sequence[Any]]
    on_rank: Callable[[DeviceMesh, int], Any]
    verdict: Callable[[dict[int, Any], str], T]

    def make_mesh(self) -> DeviceMesh:
        made: DeviceMesh = self.mesh[0](*self.mesh[1:])
        return made


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """Those that share a key, in the order of the first of each.

    >>> grouped([1, 2, 3, 5], lambda n: n % 2)
    [[1, 3, 5], [2]]
    """
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def simulated(works: Sequence[Work[T]], right: Callable[[T], bool], *, alone: bool = False) -> list[T]:
    """The verdict on each, in their order: by a run in lockstep if that is `right`, and else by one on rank threads.

    `alone`: each in a run on threads of its own, for ranks that may go on to the next while others are stopped.
    """
    found: dict[int, T] = {}
    for group in grouped(range(len(works)), lambda number: works[number].mesh):
        first = in_lockstep([works[number] for number in group])
        found.update({number: verdict for number, verdict in zip(group, first, strict=True) if verdict is not None})
        doubtful = [number for number in group if number not in found or not right(found[number])]
        for some in [[number] for number in doubtful] if alone else [doubtful]:
            found.update(zip(some, on_threads([works[number] for number in some]), strict=True))
    return [found[number] for number in range(len(works))]


def in_lockstep(works: Sequence[Work[T]]) -> list[T | None]:
    """The verdict on each in one control flow for all ranks of their mesh; None where one does not get through."""
    given: list[Sequence[Any] | None] = [None] * len(works)
    with contextlib.suppress(LocalTensorError), remembering(), lt.LocalTensorMode(works[0].ranks):  # works may be left
        mesh = works[0].make_mesh()
        for number, work in enumerate(works):
            forget()
            with contextlib.suppress(Exception):  # why: whatever stops it, rank threads say who raised what
                given[number] = work.in_lockstep(mesh)
    forget()
    return [
        None if held is None else work.verdict(dict(enumerate(held)), "")
        for work, held in zip(works, given, strict=True)
    ]


def by_rank(x: Any, ranks: int) -> list[Any]:
    """What each rank has of a value in lockstep; ranks that have the same have one object."""
    if not isinstance(x, lt.LocalTensor):
        return [x.detach() if isinstance(x, Tensor) else x] * ranks
    table = {rank: value for holders, value in x.detach().values() for rank in holders}
    return [table[rank] for rank in range(ranks)]


def on_threads(works: Sequence[Work[T]]) -> list[T]:
    """The verdict on each with a control flow for each rank of their mesh.

    A fault that ends the run, such as ranks that wait for each other, is that of the work that was being done.
    """
    found: list[T] = []
    while len(found) < len(works):
        left = works[len(found) :]
        kept: list[list[Any]] = [[] for _ in range(left[0].ranks)]
        fault = _run(left, kept)
        through = min(map(len, kept))
        found += [work.verdict(dict(enumerate(given)), "") for work, given in zip(left, zip(*kept), strict=False)]
        if through < len(left):
            some = {rank: own[through] for rank, own in enumerate(kept) if len(own) > through}
            found.append(left[through].verdict(some, fault))
    return found


def _run(works: Sequence[Work[Any]], kept: Sequence[list[Any]]) -> str:
    """Runs them until all are through, or one stops the run: then this is why."""

    def body() -> None:
        mesh = works[0].make_mesh()
        rank = mesh.get_rank()
        for work in works:
            forget()
            kept[rank].append(work.on_rank(mesh, rank))

    try:
        lt.run(body, ranks=works[0].ranks, timeout=SECONDS, leftovers="ignore")
    except LocalTensorError as error:
        return in_a_line(error)
    return ""


class RankProcesses:
    """A pool of real processes, started when first needed and reused as long as the number of ranks is the same.

    One pool at a time: each rank is a process of a hundred megabytes of its own.  `seconds` is the limit of a call.
    """

    def __init__(self, backend: str = "gloo", seconds: float = SECONDS_ON_PROCESSES) -> None:
        self.backend, self.seconds = backend, seconds
        self._pool: Pool | None = None

    def __enter__(self: T) -> T:  # noqa: PYI019
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No process is left; the next call starts others."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def run(self, play: Callable[[bytes], bytes], parts: Sequence[Any]) -> list[Outcome]:
        """What became of `play` on each rank, of its own part.  Never hangs: the pool ends what does."""
        if self._pool is None or self._pool.ranks != len(parts):
            self.close()
            self._pool = Pool(len(parts), backend=REAL.get(self.backend, self.backend), timeout=self.seconds)
        sent = [(pickling.dumps(part),) for part in parts]
        outcomes = self._pool.call(play, sent)
        if _late(outcomes):
            outcomes = self._pool.call(play, sent, timeout=PATIENCE * self._pool.timeout)
        return outcomes


def _late(outcomes: Sequence[Outcome]) -> bool:
    """Whether it was the time limit that ended them, and no rank that raised or died."""
    left = [outcome for outcome in outcomes if not isinstance(outcome, Returned)]
    return bool(left) and all(isinstance(outcome, Waiting) for outcome in left)


def unpacked(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the ranks that came back have sent."""
    return [pickling.loads(outcome.value) for outcome in outcomes if isinstance(outcome, Returned)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Lost:
    """Why ranks did not come back, and which; `raised` if it was an exception."""

    text: str
    ranks: tuple[int, ...]
    raised: Raised | None = None


def lost(outcomes: Sequence[Outcome]) -> Lost | None:
    """The first rank that died, or else that raised, or else all that wait; None if all came back."""
    for outcome in outcomes:  # first of all, since the peers of a dead process raise, or wait for it
        if isinstance(outcome, Died):
            return Lost(f"the process of rank {outcome.rank} dies (exit code {outcome.exitcode})", (outcome.rank,))
    for outcome in outcomes:
        if isinstance(outcome, Raised):
            return Lost(f"rank {outcome.rank} raises {outcome.kind}: {outcome.message}", (outcome.rank,), outcome)
    waiting = [outcome for outcome in outcomes if isinstance(outcome, Waiting)]
    where = "; ".join(f"rank {outcome.rank} waits at {outcome.where}" for outcome in waiting)
    return Lost(f"hangs: {where}", tuple(outcome.rank for outcome in waiting)) if waiting else None
