"""Why a run did not end well: one error from what is known about its ranks."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localtensor._util.events import Place, Raised, Wait
from localtensor.collectives.rendezvous import Line, Meeting, Ticket
from localtensor.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    Deadlock,
    EarlyReturn,
    GroupMismatch,
    LengthMismatch,
    ListsDiffer,
    LocalTensorError,
    MessagesLeftOver,
    RankRaised,
    ShapeMismatch,
    ShapesDiffer,
    SplitMismatch,
    SplitsDisagree,
    WorkNotWaited,
    WrongListLength,
)

# What collectives/reference.py refuses because the ranks do not fit, under the name of what differs between them.
_MISMATCH: dict[type[Exception], type[CollectiveMismatch]] = {
    ShapesDiffer: ShapeMismatch,
    SplitsDisagree: SplitMismatch,
    ListsDiffer: LengthMismatch,
    WrongListLength: LengthMismatch,
}


@dataclass(slots=True)
class Ended:
    """How one rank ended: with a value, or with an exception and the user's line that it came from."""

    value: Any = None
    error: BaseException | None = None
    place: Place | None = None


def refused(meeting: Meeting, refusal: Exception) -> LocalTensorError:
    """Everybody is there, and the collective refuses what they bring; what is no refusal of ours is the `__cause__`."""
    calls = [part.call() for part in meeting.parts.values()]
    mismatch = _MISMATCH.get(type(refusal))
    if mismatch:
        return mismatch(calls, meeting.group.last())
    if isinstance(refusal, LocalTensorError):
        return CollectiveFailed(calls, str(refusal))
    failed = CollectiveFailed(calls, f"{type(refusal).__name__}: {refusal}")
    failed.__cause__ = refusal
    return failed


def why_stuck(
    ended: Mapping[int, Ended],
    broken: Meeting | None,
    waits: Sequence[Wait],
    last: Mapping[int, Place | None],
    *,
    broke_first: bool,
) -> LocalTensorError:
    """Somebody waits, and nobody can run.  What went wrong first is the cause: parts that do not fit, or a rank
    that raised; then a rank that has returned; else the ranks wait for each other."""
    raised = [rank for rank, end in ended.items() if end.error is not None]
    if broken is not None and (broke_first or not raised):
        return broken.mismatch()
    if raised:
        return _rank_raised(ended, waits)
    returned = sorted({rank for wait in waits for rank in wait.ranks if rank in ended})
    return EarlyReturn(waits, {rank: last.get(rank) for rank in returned}) if returned else Deadlock(waits)


def at_the_end(
    ended: Mapping[int, Ended], broken: Meeting | None, unmet: Sequence[Ticket], handed_out: Sequence[Ticket]
) -> LocalTensorError | None:
    """All ranks have ended: what they left undone, or None."""
    unwaited = [ticket.part.call() for ticket in handed_out if ticket not in unmet]
    if any(end.error is not None for end in ended.values()):
        return _rank_raised(ended, ())
    if broken is not None:
        return broken.mismatch()
    if unmet:
        return MessagesLeftOver([ticket.part.call() for ticket in unmet])
    return WorkNotWaited(unwaited) if unwaited else None


def half_made(declared: Mapping[str, Mapping[int, tuple[tuple[int, ...], Line]]]) -> LocalTensorError | None:
    """A group that some of its members made and others never did: on gloo, those who made it wait there."""
    for key, by_rank in declared.items():
        members = next(iter(by_rank.values()))[0]
        missing = [rank for rank in members if rank not in by_rank]
        if missing and len(missing) < len(members):
            made = {rank: by_rank[rank][0] if rank in by_rank else () for rank in sorted({*by_rank, *members})}
            places = {rank: Place(*line) if line else None for rank, (_, line) in by_rank.items()}
            return GroupMismatch(key.rpartition("/")[2], made, places)
    return None


def _rank_raised(ended: Mapping[int, Ended], waits: Sequence[Wait]) -> RankRaised:
    failed = {rank: (end.error, end.place) for rank, end in ended.items() if end.error is not None}
    raised = [_raised(rank, error) for rank, (error, _) in failed.items()]
    verdict = RankRaised(raised, waits, {rank: place for rank, (_, place) in failed.items()})
    verdict.errors = {rank: error for rank, (error, _) in failed.items() if error is not None}
    verdict.__cause__ = verdict.errors[raised[0].rank]
    return verdict


def _raised(rank: int, error: BaseException) -> Raised:
    kind = type(error).__name__
    try:
        return Raised(rank, kind, str(error), "".join(traceback.format_exception(error)))
    except Exception as worse:  # why: an exception's own __str__ may raise anything
        return Raised(rank, kind, f"(its own text failed: {type(worse).__name__})", "")
