"""What real processes make of pairs that went wrong on simulated ranks, and whether torch's own words agree with ours.

The referee besides our definition is `distribute_tensor` of the whole tensor: where that deals other pieces than
`split` does, by the source or by the destination, nobody is called wrong, or right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localtensor._util import pickling as wire
from localtensor._util.events import Died, Raised, Returned, Waiting
from localtensor._util.events import Outcome as Event
from localtensor.processes.pool import Pool
from strategies.planner.audit.compare import compared
from strategies.planner.audit.rank_run import Told, play
from strategies.planner.audit.simulated_run import Job, Outcome, judged

SECONDS = 20.0
"""Time limit of a pair, or of a batch of pairs that do not stop."""
FIRST = 120.0
BATCH = 24


class Bench:
    """A pool of real processes, of as many ranks as were asked for last."""

    def __init__(self, backend: str = "gloo", seconds: float = SECONDS) -> None:
        self.backend, self.seconds = backend, seconds
        self._pool: Pool | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def confirm(self, jobs: Sequence[Job], mode: str) -> list[Outcome]:
        """What becomes of each on real processes, in their order.  Never hangs: the pool ends what does."""
        found: dict[int, Outcome] = {}
        groups: dict[int, list[int]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault(job.pair.mesh.ranks, []).append(number)
        for ranks, numbers in sorted(groups.items()):
            for start in range(0, len(numbers), BATCH):
                batch = numbers[start : start + BATCH]
                found.update(zip(batch, self._batch([jobs[n] for n in batch], mode, ranks), strict=True))
        return [found[number] for number in range(len(jobs))]

    def _batch(self, jobs: Sequence[Job], mode: str, ranks: int) -> list[Outcome]:
        events = self._call(jobs, mode, ranks)
        if not all(isinstance(event, Returned) for event in events):
            if len(jobs) == 1:
                return [_lost(events)]
            return [self._batch([job], mode, ranks)[0] for job in jobs]
        columns = [wire.loads(event.value) for event in events if isinstance(event, Returned)]  # type: ignore[arg-type]
        return [_heard(job, told) for job, told in zip(jobs, zip(*columns, strict=True), strict=True)]

    def _call(self, jobs: Sequence[Job], mode: str, ranks: int) -> list[Event]:
        if self._pool is None or self._pool.ranks != ranks:
            self.close()
            self._pool = Pool(ranks, backend=self.backend, timeout=self.seconds)
            self._pool.call(play, [(wire.dumps([]),)] * ranks, timeout=FIRST)  # imports are no part of a pair's time
        sent = [[job.part(mode, job.pieces[rank], job.whole) for job in jobs] for rank in range(ranks)]
        return self._pool.call(play, [(wire.dumps(parts),) for parts in sent])


def _heard(job: Job, told: Sequence[Told]) -> Outcome:
    outcome = judged(job, told)
    referees = (job.pair.src, [one.given for one in told]), (job.pair.dst, [one.dealt for one in told])
    for spec, every in referees:
        pieces = [piece for piece in every if piece is not None]
        apart = compared(pieces, job.whole, spec).text if len(pieces) == len(told) else ""
        if apart:
            text = f"distribute_tensor itself deals {spec} otherwise: {apart}"
            return replace(outcome, kind="disputed", text=text)
    return outcome


def _lost(events: Sequence[Event]) -> Outcome:
    for event in events:
        if isinstance(event, Died):
            return Outcome(
                "stops", f"the process of rank {event.rank} dies (exit code {event.exitcode})", (event.rank,)
            )
    for event in events:
        if isinstance(event, Raised):
            return Outcome("stops", f"rank {event.rank} raises {event.kind}: {event.message}", (event.rank,))
    waiting = [event for event in events if isinstance(event, Waiting)]
    where = "; ".join(f"rank {event.rank} waits at {event.where}" for event in waiting)
    return Outcome("stops", f"hangs: {where}", tuple(event.rank for event in waiting))
