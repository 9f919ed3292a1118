"""One finding for each cause: every bad pair is made as small as it goes, and what comes to the same is one finding."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strategies.planner.audit.pairs import Pair
from strategies.planner.audit.rank_run import users
from strategies.planner.audit.real_run import Bench
from strategies.planner.audit.shrink import smallest, weight
from strategies.planner.audit.simulated_run import Job, Outcome, play_all
from strategies.planner.audit.torch_plans import MODES
from strategies.planner.audit.verdict import Verdict

Told = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that is wrong, by the smallest pair that shows it."""

    symptom: str
    pair: Pair
    modes: tuple[str, ...]
    """DTensor's planners, of those that were tried, under which this pair shows it."""
    outcome: Outcome
    met: int
    """How many pairs came down to this one."""
    example: Pair
    """The first of them."""
    confirmed: bool = False
    """Whether real processes showed the same."""
    note: str = ""
    """What they showed instead."""

    @property
    def asked(self) -> bool:
        """Whether a user can ask for it: no shard order, no new Partial."""
        return users(self.pair.src, self.pair.dst)

    @property
    def pattern(self) -> str:
        """`S(0),S(0) -> R,R, a+b flattened`: the placements alone."""
        return self.written(self.pair)

    @staticmethod
    def written(pair: Pair) -> str:
        also = "".join(f", {'+'.join(names)} flattened" for names in pair.flattened)
        dtype = str(pair.src).split("[")[0]
        of = "" if dtype == "f64" else f" of {dtype}"
        return f"{_placed(pair.src)} -> {_placed(pair.dst)}{of}{also}"


def symptom(outcome: Outcome) -> str:
    """What stays the same while a pair is made smaller: not the numbers, nor which rank it is.

    >>> symptom(Outcome("wrong", "rank 1 holds shape (4, 6), not (4, 3)")), symptom(Outcome("refused", "ValueError: no 3"))
    ('wrong values', 'refused: ValueError: no #')
    """
    if outcome.kind == "wrong":
        return "wrong dtype" if "torch." in outcome.text else "wrong values"
    text = re.sub(r"^rank \d+ ", "a rank ", re.sub(r" in group .*", "", outcome.text.split("; ")[0]))
    text = re.sub(r"Partial\((\w+)\)", r"P(\1)", text)  # a kind that has an error of its own keeps its name
    text = re.sub(r"to P\((sum|avg|min|max|product)\) not", "to P not", text)
    return f"{outcome.kind}: {re.sub(r'[0-9]+', '#', text)[:80]}"


def causes(verdicts: Sequence[Verdict], told: Told = lambda: None) -> list[Cause]:
    """The findings among these, the most often met first; `told` is called for every pair that is done."""
    found: dict[str, Cause] = {}
    known: dict[tuple[str, str, str], Pair] = {}
    shown: dict[tuple[str, str], Cause] = {}
    tried = tuple(mode for mode in MODES if any(verdict.mode == mode for verdict in verdicts))
    for verdict in verdicts:
        mark = symptom(verdict.outcome)
        key = (verdict.mode, mark, "" if verdict.outcome.kind == "refused" else str(verdict.pair))
        if key not in known:
            known[key] = _least(verdict, mark)
        pair = known[key]
        if (mark, str(pair)) not in shown:
            shown[mark, str(pair)] = _met(pair, mark, verdict, tried)
        one, same = shown[mark, str(pair)], found.get(Cause.written(pair))
        if same is None or _rank(one) < _rank(same):
            found[one.pattern] = replace(one, met=1 + (same.met if same else 0))
        else:
            found[one.pattern] = replace(same, met=same.met + 1)
        told()
    return sorted(found.values(), key=lambda one: (_ORDER.index(one.outcome.kind), -one.met, repr(one.pair)))


def _rank(one: Cause) -> tuple[object, ...]:
    """Of two that show the same placements: the worse, then the simpler."""
    return _ORDER.index(one.outcome.kind), weight(one.pair)


def _met(pair: Pair, mark: str, verdict: Verdict, tried: Sequence[str]) -> Cause:
    """The finding, under whichever of the planners show it."""
    outcomes = {mode: play_all([Job.of(pair)], mode)[0] for mode in tried}
    modes = tuple(mode for mode in tried if symptom(outcomes[mode]) == mark)
    return Cause(mark, pair, modes, outcomes[modes[0]], 0, verdict.pair)


_ORDER = ("wrong", "stops", "refused", "right")


def confirmed(found: Sequence[Cause], bench: Bench, told: Told = lambda: None) -> list[Cause]:
    """The same, each played on real processes."""
    made = []
    for one in found:
        real = bench.confirm([Job.of(one.pair)], one.modes[0])[0]
        same = real.kind == one.outcome.kind
        made.append(replace(one, confirmed=same, note="" if same else f"{real.kind}: {real.text}"))
        told()
    return made


def _least(verdict: Verdict, mark: str) -> Pair:
    def shows(pair: Pair) -> bool:
        return symptom(play_all([Job.of(pair)], verdict.mode)[0]) == mark

    return smallest(verdict.pair, verdict.mode, shows).pair


def _placed(spec: object) -> str:
    """`S(0)[1],S(0)[0]` of `f64[8] @ a:S(0)[1], b:S(0)[0]`."""
    return ",".join(part.partition(":")[2] for part in str(spec).partition(" @ ")[2].split(", "))
