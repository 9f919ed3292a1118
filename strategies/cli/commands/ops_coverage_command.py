"""What `python -m strategies.ops --coverage` does: our rules beside DTensor's on the most used overloads, and the figure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from strategies.base.progress import bar
from strategies.base.uninterrupted import undisturbed
from strategies.base.worker_pool import Crew
from strategies.inputs import opinfo_samples as samples
from strategies.model.verdict import CLEAN, NOTHING, WRONG
from strategies.ops.validation.coverage import Compared, coverage
from strategies.ops.validation.most_used import most_used
from strategies.ops.validation.samples import calls


@undisturbed()
def coverage_command(*, most: int = 6, ranks: Sequence[int] = (2, 3), workers: int = 1, quiet: bool = False) -> int:
    """The exit code: 0 if every overload that could be compared is covered, 1 if not, 3 if none could be compared."""
    out = Console(width=None if sys.stdout.isatty() else 140, highlight=False, emoji=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    with bar(errors, quiet) as progress:
        progress.phase("calls", len(samples.database()))
        with Crew(workers) as crew:
            found = calls(crew, most_used(), most=most, tick=progress.tick)
        progress.phase("overloads", len(most_used()))
        with Crew(workers) as crew:
            compared = coverage(crew, found.of, ranks=ranks, tick=progress.tick)
    return shown(compared, out)


def shown(compared: Sequence[Compared], out: Console) -> int:
    """Prints each line that we lack, what could not be compared, and the figure; gives the exit code."""
    for one in compared:
        for lack in one.lacking:
            out.print(
                f"{'left out: ' + lack.excused if lack.excused else 'lacking'}: {lack.rule} on {lack.ranks} ranks, {lack.call}",
                markup=False,
            )
    for one in compared:
        if one.why:
            out.print(f"not compared: {one.op}: {one.why}", markup=False)
    able = [one for one in compared if not one.why]
    theirs, ours = sum(one.theirs for one in able), sum(one.same + one.served for one in able)
    done = sum(one.covered for one in able)
    out.print(
        f"{done} of {len(able)} overloads covered; of {theirs} different lines of DTensor's that are right, {ours} are served "
        f"({sum(one.same for one in able)} the same); {len(compared) - len(able)} overloads have nothing to compare",
        markup=False,
    )
    return NOTHING if not able else CLEAN if done == len(able) else WRONG
