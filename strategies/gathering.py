"""Every overload's samples, ready to be tried: captured, derived where no capture reaches, and chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strategies import codec, derived, modules, population, selection
from strategies.choice import choose
from strategies.executors import Hands
from strategies.progress import Progress
from strategies.rules import Sample
from strategies.settings import Settings
from strategies.verdicts import Crash

DERIVED = 10
"""Samples that are tried of an overload that no capture reaches."""
Shelf = dict[str, tuple[Sequence[Sample], str]]
"""Of each overload its samples, and why there are none."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The samples; what crashed on the way, and what torch itself refused."""

    shelf: Shelf
    crashed: tuple[Crash, ...]
    refused: Counter[str]


def capture(hands: Hands, settings: Settings, rules: modules.Registered | None, progress: Progress) -> Captured:
    """Where the likely OpInfos do not reach an overload that is asked for, the samples of all OpInfos."""
    picked = selection.pick(settings, rules)

    def units(count: int) -> None:
        progress.phase("capturing samples", count)

    by_op, crashed, refused = selection.gather(hands, picked, settings, rules, progress.tick, units)
    more = selection.wider(picked, by_op)
    if more.infos:
        found, dead, no = selection.gather(hands, more, settings, None, progress.tick, units)
        by_op, crashed, refused = {**by_op, **found}, [*crashed, *dead], refused + no
    wanted = [m.op for m in population.everything(settings.device)] if picked.everything else sorted(picked.overloads)
    progress.phase("deriving samples", len(derived.lacking(by_op, wanted, settings.seed)))
    made, reasons = derived.gather(hands, by_op, wanted, settings.seed, progress.tick)
    shelf: Shelf = {op: ((), why) for op, why in reasons.items()}
    for op, own in (*selection.chosen(by_op, picked, settings), *((op, choose(s, DERIVED)) for op, s in made.items())):
        kept = [sample for sample in own if codec.has_form(sample)]
        shelf[op] = kept, "" if kept else "its calls hold values that have no form in a journal"
        if 0 < len(kept) < len(own):
            refused[f"{op}: a call holds a value that has no form in a journal"] += len(own) - len(kept)
    return Captured(dict(sorted(shelf.items())), tuple(crashed), refused)
