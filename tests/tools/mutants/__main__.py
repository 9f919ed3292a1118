"""`make mutants`: bugs are planted, by hand and by Cosmic Ray, and the tests of their modules have to find them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.tools.command_line import parser_of
from tests.tools.mutants.drawn import changed_lines, drawn
from tests.tools.mutants.explained import explained
from tests.tools.mutants.modules import modules, tests_of
from tests.tools.mutants.planted import PLANTED
from tests.tools.mutants.trying import Trials, warm
from tests.tools.mutants.values import ROOT, Mutant, Outcome, Planted

EXAMPLES = """examples:
  python -m tests.tools.mutants --minutes 20                      those planted by hand, then drawn ones until the time is up
  python -m tests.tools.mutants --planted                         those planted by hand, all of them
  python -m tests.tools.mutants localtensor.layout.shards --drawn 30     thirty drawn mutants of one module
  python -m tests.tools.mutants strategies --drawn 100 --seed 7   a hundred others, over all modules of a package

Exit code 1 if a planted bug survives, or a drawn one that tests/tools/mutants/explained.py does not explain; 2 for a module that
does not exist; 3 if nothing was tried.
"""


def main() -> int:
    asked = _asked()
    try:
        paths = modules(asked.modules)
    except ValueError as wrong:
        print(f"python -m tests.tools.mutants: {wrong}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: with what it left put away
    warm()
    outcomes: list[Outcome] = []
    try:
        with Trials() as trials:
            for mutant in _mutants(asked, paths):
                outcomes.append(trials.outcome(mutant))
                _say(outcomes[-1])
    except KeyboardInterrupt:
        print("stopped; what was tried until then:")
    if asked.json:
        asked.json.write_text(json.dumps([_record(o) for o in outcomes], indent=1))
    return _ended(outcomes)


def _mutants(asked: argparse.Namespace, paths: list[str]) -> Iterator[Mutant]:
    """By hand first, then drawn ones, until the number or the time is up."""
    until = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    if asked.planted or not asked.drawn:
        for bug in PLANTED:
            if bug.path in paths:
                try:
                    yield planted(bug)
                except ValueError as misfit:  # tests/architecture/test_mutants.py says so, too
                    print(f"misfit     {misfit}", flush=True)
    number = 0 if asked.planted else asked.drawn or (sys.maxsize if asked.minutes else 0)
    many: Iterable[Mutant] = drawn(paths, asked.seed) if number else ()
    for tried, mutant in enumerate(many):
        if tried >= number or time.monotonic() > until:
            return
        yield mutant


def planted(bug: Planted) -> Mutant:
    text = bug.text()
    return Mutant(
        bug.path, text, changed_lines((ROOT / bug.path).read_text(), text), bug.why, bug.tests or tests_of(bug.path)
    )


def _say(outcome: Outcome) -> None:
    mutant = outcome.mutant
    print(f"{outcome.end:10} {outcome.seconds:5.1f} s  {mutant.path}  {mutant.why}", flush=True)
    if not outcome.caught:
        shown = f"{mutant.change}\n{explained(mutant) or outcome.seen}\ntests: {' '.join(mutant.tests)}"
        print("    " + shown.replace("\n", "\n    "), flush=True)


def _ended(outcomes: list[Outcome]) -> int:
    if not outcomes:
        print("python -m tests.tools.mutants: nothing was tried", file=sys.stderr)
        return 3
    by_module: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        module = "/".join(Path(outcome.mutant.path).parts[:-1])
        by_module.setdefault(module, Counter())[outcome.end] += 1
    for module, ends in sorted(by_module.items()):
        print(f"{module}: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    alive = [o for o in outcomes if not o.caught]
    unexplained = [o for o in alive if explained(o.mutant) is None]
    caught = len(outcomes) - len(alive)
    print(f"{caught} of {len(outcomes)} caught; of the others {len(alive) - len(unexplained)} are explained")
    return int(bool(unexplained))


def _record(outcome: Outcome) -> dict[str, object]:
    mutant = outcome.mutant
    return {
        "path": mutant.path,
        "change": mutant.change,
        "why": mutant.why,
        "tests": list(mutant.tests),
        "end": outcome.end,
        "seconds": round(outcome.seconds, 1),
        "seen": outcome.seen,
    }


def _asked() -> argparse.Namespace:
    parser = parser_of("mutants", EXAMPLES)
    parser.add_argument("modules", nargs="*", help="files, folders or modules; all modules by default")
    parser.add_argument("--planted", action="store_true", help="those planted by hand, and no others")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="so many drawn ones, and none planted by hand"
    )
    parser.add_argument("--minutes", type=float, default=0, help="no mutant begins later than this")
    parser.add_argument("--seed", type=int, default=0, help="other mutants (default 0)")
    parser.add_argument("--json", type=Path, help="every mutant and what became of it, for programs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
