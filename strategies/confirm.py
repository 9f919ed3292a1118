"""Suspects before real processes: DTensor itself, end to end, with exactly those placements.

Only what goes wrong here is called Unsound.  A rule that DTensor does not follow (it redistributes
first), or whose local arguments it rewrites so that the result is right, is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Shard

from localtensor import wire
from localtensor.errors import BadPlacement
from localtensor.events import Died, Outcome, Raised, Returned, Waiting
from localtensor.placement import is_plain, parse, short
from localtensor.processes import Pool
from localtensor.shards import local_shape
from strategies.picture import text
from strategies.probe import Case, rounding
from strategies.stage import Heard, Part, play
from strategies.truth import agrees, close

SECONDS = 20.0
"""Time limit of one case."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """`wrong` is the reason if the real run went wrong, else empty; `note` says what happened instead."""

    wrong: str
    note: str = ""
    got: str = ""
    want: str = ""
    heard: tuple[Heard, ...] = ()
    failed: str = ""
    refused: str = ""
    """What every rank raised when it ran the op, if that is what happened."""


class Court:
    """A pool of real processes, started when first needed and reused as long as the number of ranks is the same.

    One pool at a time: each rank is a process of a hundred megabytes of its own.
    """

    def __init__(self, backend: str, device: str = "cpu", home: tuple[str, str] = ("", "")) -> None:
        self.backend, self.device, self.home = backend, device, home
        self._pool: Pool | None = None

    def __enter__(self) -> Court:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def confirm(self, case: Case) -> Confirmation:
        """What the real DTensor makes of this case.  Never hangs: the pool ends what does."""
        pool = self._pool
        if pool is None or pool.ranks != case.ranks:
            self._leave()
            pool = self._pool = Pool(case.ranks, backend=self.backend, timeout=SECONDS)
        outcomes = pool.call(play, [(wire.dumps(part),) for part in parts_of(case, self.device, self.home)])
        return weigh(case, outcomes)


def parts_of(case: Case, device: str, home: tuple[str, str] = ("", "")) -> list[Part]:
    """What each rank is sent."""
    whole = case.truth.inputs
    shapes = tuple(tuple(t.shape) for t in whole)
    strides = tuple(tuple(t.stride()) for t in whole)
    placements = tuple(p for p in case.rule.inputs if p is not None)

    def part(rank: int) -> Part:
        pieces = tuple(column[rank].detach().cpu().clone() for column in case.held)
        return Part(case.sample.call, placements, pieces, shapes, strides, device, home)

    return [part(rank) for rank in range(case.ranks)]


def weigh(case: Case, outcomes: Sequence[Outcome]) -> Confirmation:
    """The verdict of a real run."""
    lost = [o for o in outcomes if not isinstance(o, Returned)]
    if lost:
        return _lost(lost)
    heard = tuple(wire.loads(o.value) for o in outcomes if isinstance(o, Returned))  # type: ignore[arg-type]
    failed = next((h for h in heard if h.errors), None)
    shape = "" if failed and failed.failed == "op" else _misshapen(case, heard)
    if shape:
        return Confirmation(shape, heard=heard)
    if failed:
        return _raised(failed, heard)
    return _compared(case, heard)


def _lost(lost: Sequence[Outcome]) -> Confirmation:
    for outcome in lost:  # first of all, since the peers of a dead process raise, or wait for it
        if isinstance(outcome, Died):
            return Confirmation(f"the process of rank {outcome.rank} dies (exit code {outcome.exitcode})")
    for outcome in lost:
        if isinstance(outcome, Raised):
            return Confirmation(
                "", f"the stage itself failed: {outcome.kind}: {outcome.message}", failed=outcome.traceback
            )
    waiting = [o for o in lost if isinstance(o, Waiting)]
    where = "; ".join(f"rank {o.rank} waits at {o.where}" for o in waiting)
    return Confirmation(f"hangs: {where}")


def _raised(failed: Heard, heard: tuple[Heard, ...]) -> Confirmation:
    who = [rank for rank, error in enumerate(failed.errors) if error]
    said = failed.errors[who[0]]
    if len(who) < len(failed.errors):
        names = ", ".join(map(str, who))
        return Confirmation(
            f"rank {names} raises {said}; its peers go on and wait for it at the next collective", heard=heard
        )
    where = "refuses this call" if failed.failed == "op" else "cannot assemble the result"
    refused = said if failed.failed == "op" else ""
    return Confirmation("", f"DTensor {where} on every rank: {said}", heard=heard, refused=refused)


def _misshapen(case: Case, heard: Sequence[Heard]) -> str:
    for i, want in enumerate(case.truth.outputs):
        for rank, one in enumerate(heard):
            if i >= len(one.placements) or one.placements[i] == "-" or not isinstance(want, Tensor):
                continue
            placement = _read(one.placements[i])
            if placement is None or (isinstance(placement, Shard) and placement.dim >= want.ndim):
                continue
            asked = local_shape(want.shape, placement, case.ranks, rank)
            if one.shapes[i] != asked:
                return f"rank {rank} holds shape {one.shapes[i]}, {one.placements[i]} of {tuple(want.shape)} is {asked}"
    return ""


def _read(text: str) -> Any:
    """The placement, or None for one of DTensor's own, which has no arithmetic here: its values are compared."""
    try:
        placement = parse(text)
    except BadPlacement:
        return None
    return placement if is_plain(placement) else None


def _compared(case: Case, heard: tuple[Heard, ...]) -> Confirmation:
    took = ", ".join(heard[0].placements[: len(case.rule.outputs)])
    claimed = ", ".join(short(p) for p in case.rule.outputs)
    for i, want in enumerate(case.truth.outputs):
        slack = case.truth.slack[i]
        if not isinstance(want, Tensor) or slack is None or case.truth.metadata_only:
            continue
        for rank, one in enumerate(heard):
            got = one.whole[i] if i < len(one.whole) else None
            problem = _unlike(got, want.cpu(), slack.cpu(), [h.pieces[i] for h in heard], one.placements[i])
            if problem:
                which = f"output {i}" if len(case.truth.outputs) > 1 else "the result"
                return Confirmation(
                    f"rank {rank} assembles {which} from {one.placements[i]}: {problem}",
                    "",
                    text(got),
                    text(want),
                    heard,
                )
    note = (
        "DTensor's own run is right"
        if took == claimed
        else f"DTensor does not follow it: it gives {took}, which is right"
    )
    return Confirmation("", note, heard=heard)


def _unlike(got: Any, want: Tensor, slack: Tensor, pieces: Sequence[Any], placement: str) -> str:
    if not isinstance(got, Tensor):
        return f"it is {got!r}, not a tensor"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"{got.dtype}, not {want.dtype}"
    if placement.startswith("P("):
        slack = slack + rounding(pieces)
    if agrees(got, want, slack):
        return ""
    wrong = ~close(got, want, slack)
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{got[place].item():.6g} at {list(place)} where the op gives {want[place].item():.6g} "
        f"({int(wrong.sum())} of {wrong.numel()} elements differ)"
    )
