"""What `python -m strategies.ops` does: every rule of our own on trial at full strength, totals, and the exit code."""

from __future__ import annotations

import fnmatch
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from strategies.base.progress import Progress, bar
from strategies.base.uninterrupted import undisturbed
from strategies.base.worker_pool import Crew
from strategies.inputs import opinfo_samples as samples
from strategies.model.verdict import CLEAN, NOTHING, USAGE, WRONG
from strategies.ops.semantics.rulebook import Book, Entry
from strategies.ops.validation.run import Heard, Terms, trials
from strategies.ops.validation.samples import calls

CALL = "python -m strategies.ops"


@undisturbed()
def own_command(
    book: Book,
    patterns: Sequence[str] = (),
    *,
    seeds: int = 3,
    most: int = 24,
    ranks: Sequence[int] = (2, 3, 4),
    workers: int = 1,
    quiet: bool = False,
) -> int:
    """The exit code: 0 where every entry that was tested is right, 1 where one is wrong, 2 for a pattern that names
    no entry, 3 where nothing was tested or a seed tested nothing.  A pattern names overloads or families.

    What is wrong, and what could not be tried with its reason, goes to standard output; progress to standard error.
    """
    out = Console(width=None if sys.stdout.isatty() else 140, highlight=False, emoji=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    entries = chosen(book, patterns)
    if not entries:
        errors.print(f"{CALL}: no rule of our own is of {' or '.join(patterns) or 'any family'}.", markup=False)
        return USAGE
    heard: list[Heard] = []
    with bar(errors, quiet) as progress:
        for seed in range(seeds):
            heard += _once(entries, Terms(tuple(ranks), seed), most, workers, progress, near=len(entries) < len(book))
    return told(heard, out)


def chosen(book: Book, patterns: Sequence[str]) -> list[Entry]:
    """The entries whose overload, packet or family one of the patterns fits, in their order; all without patterns."""
    return [e for e in book if not patterns or any(_fits(e, pattern) for pattern in patterns)]


def _fits(entry: Entry, pattern: str) -> bool:
    names = (entry.op, entry.op.partition(".")[2], entry.op.split(".")[1], entry.family)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _once(
    entries: Sequence[Entry], terms: Terms, most: int, workers: int, progress: Progress, *, near: bool
) -> list[Heard]:
    progress.phase(f"calls, seed {terms.seed}", len(samples.database()))
    with Crew(workers) as crew:
        found = calls(crew, [e.op for e in entries], seed=terms.seed, most=most, tick=progress.tick, near=near)
    progress.phase(f"trials, seed {terms.seed}", len([e for e in entries if found.of.get(e.op)]))
    with Crew(workers) as crew:  # another one: what was captured is there where it is forked
        return trials(crew, entries, found.of, found.without, terms, progress.tick)


def told(heard: Sequence[Heard], out: Console) -> int:
    """Prints what is wrong, what was not tested and why, and the totals; gives the exit code."""
    wrong = dict.fromkeys(sentence for one in heard for sentence in one.wrong)
    tested = {one.op for one in heard if one.tested}
    for sentence in wrong:
        out.print(f"WRONG {sentence}", markup=False)
    for op, reasons in _untested(heard, tested).items():
        out.print(f"not tested: {op}: {reasons}", markup=False)
    of_family = Counter(one.family for one in {h.op: h for h in heard}.values() if one.op in tested)
    for family, count in sorted(of_family.items()):
        out.print(f"{family}: {count} overloads", markup=False)
    sound, tried = sum(one.sound for one in heard), sum(one.calls for one in heard)
    out.print(
        f"{len(tested)} of {len({one.op for one in heard})} overloads tested on {tried} calls: "
        f"{sound} instances of their lines are right, {len(wrong)} lines are wrong",
        markup=False,
    )
    return WRONG if wrong else CLEAN if tested else NOTHING


def _untested(heard: Sequence[Heard], tested: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in heard:
        if one.op not in tested:
            found.setdefault(one.op, "; ".join(one.untried[:2]) or f"it has no line for any of {one.calls} calls")
    return dict(sorted(found.items()))
