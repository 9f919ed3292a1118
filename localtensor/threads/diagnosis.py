"""Diagnosis of a failed run: one error from the state of its ranks."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localtensor import errors
from localtensor._util.events import Place, Raised, Wait
from localtensor.collectives.rendezvous import Contribution, Line, Rendezvous, Ticket

# Refusals of collectives/reference.py because the ranks disagree, and the error of a run for each.
_MISMATCH: dict[type[Exception], type[errors.CollectiveMismatch]] = {
    errors.ShapesDiffer: errors.ShapeMismatch,
    errors.SplitsDisagree: errors.SplitMismatch,
    errors.ListsDiffer: errors.LengthMismatch,
    errors.WrongListLength: errors.LengthMismatch,
}


@dataclass(slots=True)
class RankEnd:
    """How one rank ended: with a value, or with an exception and the user's line that raised it."""

    value: Any = None
    error: BaseException | None = None
    place: Place | None = None


def collective_error(rendezvous: Rendezvous, refusal: Exception) -> errors.LocalTensorError:
    """The error of a complete rendezvous whose collective refused its inputs; torch's own exception is its `__cause__`."""
    calls = [part.call() for part in rendezvous.parts.values()]
    mismatch = _MISMATCH.get(type(refusal))
    if mismatch:
        return mismatch(calls, rendezvous.group.recent_calls())
    if isinstance(refusal, errors.LocalTensorError):
        return errors.CollectiveFailed(calls, str(refusal))
    failed = errors.CollectiveFailed(calls, f"{type(refusal).__name__}: {refusal}")
    failed.__cause__ = refusal
    return failed


def stuck_error(
    ended: Mapping[int, RankEnd],
    broken: Rendezvous | None,
    waits: Sequence[Wait],
    last: Mapping[int, Place | None],
    *,
    broke_first: bool,
) -> errors.LocalTensorError:
    """The error when some rank waits and none can run: the earlier of a mismatch and a rank that raised; else a rank
    that has returned too early; else a deadlock."""
    raised = [rank for rank, end in ended.items() if end.error is not None]
    if broken is not None and (broke_first or not raised):
        return broken.mismatch()
    if raised:
        return _rank_raised(ended, waits)
    returned = sorted({rank for wait in waits for rank in wait.ranks if rank in ended})
    return (
        errors.EarlyReturn(waits, {rank: last.get(rank) for rank in returned}) if returned else errors.Deadlock(waits)
    )


def timeout_words(part: Contribution, missing: Sequence[int], seconds: float, *, everyone: bool) -> str:
    """What gloo says of a wait whose time limit has passed, for programs that look for its words."""
    limit = f"{seconds * 1000:g}"
    if part.kind == "monitored_barrier":
        first = part.group.ranks[0]
        if part.rank != first:
            words = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from"
            return f"Rank {part.rank} {words} rank {first}. Please check rank {first} logs for faulty rank."
        if not seconds:
            return f"[Rank {first}]: Rank {first} timed out in monitoredBarrier after 0 ms."
        named = f"Ranks {', '.join(map(str, missing))}" if everyone else f"Rank {missing[0]}"
        return f"[Rank {first}]: {named} failed to pass monitoredBarrier in {limit} ms"
    if part.kind.startswith("store."):
        return "Wait timeout"
    if part.kind in ("send", "recv"):
        return f"Timed out waiting {limit}ms for {part.kind} operation to complete"
    waits_for = ", ".join(map(str, missing))
    return f"Operation timed out! Timed out waiting {limit}ms for recv operation to complete, from rank {waits_for}"


def leftover_error(
    ended: Mapping[int, RankEnd], broken: Rendezvous | None, unmet: Sequence[Ticket], handed_out: Sequence[Ticket]
) -> errors.LocalTensorError | None:
    """The error when all ranks have ended: what they left undone, or None."""
    unwaited = [ticket.part.call() for ticket in handed_out if ticket not in unmet]
    if any(end.error is not None for end in ended.values()):
        return _rank_raised(ended, ())
    if broken is not None:
        return broken.mismatch()
    if unmet:
        return errors.MessagesLeftOver([ticket.part.call() for ticket in unmet])
    return errors.WorkNotWaited(unwaited) if unwaited else None


def partial_group_error(
    declared: Mapping[str, Mapping[int, tuple[tuple[int, ...], Line]]],
) -> errors.LocalTensorError | None:
    """The error for a group that only some of its members made, or None: on gloo, those that made it would wait."""
    for key, by_rank in declared.items():
        members = next(iter(by_rank.values()))[0]
        missing = [rank for rank in members if rank not in by_rank]
        if missing and len(missing) < len(members):
            made = {rank: by_rank[rank][0] if rank in by_rank else () for rank in sorted({*by_rank, *members})}
            places = {rank: Place(*line) if line else None for rank, (_, line) in by_rank.items()}
            return errors.GroupMismatch(key.rpartition("/")[2], made, places)
    return None


def _rank_raised(ended: Mapping[int, RankEnd], waits: Sequence[Wait]) -> errors.LocalTensorError:
    """The error of a run whose ranks raised; of a timeout that was not caught, the reason why no rank could run."""
    first = next(end.error for end in ended.values() if end.error is not None)
    if isinstance(first, errors.CollectiveTimeout) and first.diagnosis is not None:
        return first.diagnosis
    failed = {rank: (end.error, end.place) for rank, end in ended.items() if end.error is not None}
    raised = [_raised_event(rank, error) for rank, (error, _) in failed.items()]
    verdict = errors.RankRaised(raised, waits, {rank: place for rank, (_, place) in failed.items()})
    verdict.errors = {rank: error for rank, (error, _) in failed.items() if error is not None}
    verdict.__cause__ = verdict.errors[raised[0].rank]
    return verdict


def _raised_event(rank: int, error: BaseException) -> Raised:
    kind = type(error).__name__
    try:
        return Raised(rank, kind, str(error), "".join(traceback.format_exception(error)))
    except Exception as worse:  # why: an exception's own __str__ may raise anything
        return Raised(rank, kind, f"(its own text failed: {type(worse).__name__})", "")
