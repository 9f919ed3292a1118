"""`make flaky`: the suite again and again, each time in another random order, on two workers; which tests fail at times?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.tools.command_line import parser_of

ROOT = Path(__file__).parents[3]
EXAMPLES = """examples:
  python -m tests.tools.flaky --times 20                          the whole suite, twenty orders: hours
  python -m tests.tools.flaky --times 20 tests/tools/races              one folder
  python -m tests.tools.flaky --times 20 --journal flaky.jsonl    stopped by Ctrl-C, it goes on where it was

Exit code 1 if a test failed in any order; each comes with what it said and the command that repeats its order.  3 if
nothing ran.
"""
KEPT = 4000
"""Characters of a failure's text: what a test left behind may not fail again."""


@dataclass(frozen=True)
class Run:
    """One order: the seed that makes it, what pytest counted, which tests failed, and the end of what each said."""

    seed: int
    tests: int
    seconds: float
    code: int
    failed: tuple[str, ...]
    said: tuple[str, ...] = ()


def main() -> int:
    asked = _asked()
    journal: Path | None = asked.journal
    done = _read(journal) if journal else {}
    try:
        for seed in range(asked.first, asked.first + asked.times):
            if seed not in done:
                done[seed] = _once(seed, asked.what, asked.workers)
                if journal:
                    with journal.open("a") as file:
                        file.write(json.dumps(asdict(done[seed])) + "\n")
            _say(done[seed], asked.what, asked.workers)
    except KeyboardInterrupt:
        print("stopped; what was run until then:")
    return _ended(list(done.values()))


def command(seed: int, what: list[str], workers: int) -> list[str]:
    order = ["--random-order", "--random-order-seed", str(seed)]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), *order, *what]


def _once(seed: int, what: list[str], workers: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        started = time.monotonic()
        said = subprocess.run(
            [*command(seed, what, workers), f"--junit-xml={report}"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - started
        if not report.exists():
            print(said.stdout[-2000:] + said.stderr[-2000:], file=sys.stderr)
            return Run(seed, 0, seconds, said.returncode, ("pytest itself",), (said.stderr[-KEPT:],))
        cases = list(ET.parse(report).iter("testcase"))
    failed = [(case, why) for case in cases for why in (*case.findall("failure"), *case.findall("error"))]
    names = tuple(f"{case.get('classname')}::{case.get('name')}" for case, _ in failed)
    return Run(seed, len(cases), seconds, said.returncode, names, tuple((why.text or "")[-KEPT:] for _, why in failed))


def _say(run: Run, what: list[str], workers: int) -> None:
    print(f"order {run.seed}: {run.tests} tests in {run.seconds:.0f} s, {len(run.failed)} failed", flush=True)
    for name, said in zip(run.failed, run.said or [""] * len(run.failed), strict=True):
        print(f"  {name}")
        print(textwrap.indent(said, "    "))
    if run.failed:
        shown = ["python", *command(run.seed, what, workers)[1:]]
        print("  again: " + " ".join(shown), flush=True)


def _ended(runs: list[Run]) -> int:
    if not any(run.tests for run in runs):
        print("python -m tests.tools.flaky: nothing ran", file=sys.stderr)
        return 3
    failures = Counter(name for run in runs for name in {*run.failed})
    print(f"{len(runs)} orders, {sum(run.tests for run in runs)} tests, {len(failures)} tests failed at times")
    for name, times in failures.most_common():
        print(f"  {times} of {len(runs)}  {name}")
    return int(bool(failures) or any(run.code for run in runs))


def _read(journal: Path) -> dict[int, Run]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    runs = [json.loads(line) for line in lines]
    tuples = ("failed", "said")  # JSON has lists only
    return {run["seed"]: Run(**(run | {name: tuple(run.get(name, ())) for name in tuples})) for run in runs}


def _asked() -> argparse.Namespace:
    parser = parser_of("flaky", EXAMPLES)
    parser.add_argument("what", nargs="*", help="files or folders of tests; the whole suite by default")
    parser.add_argument("--times", type=int, default=20, help="so many orders (default 20)")
    parser.add_argument("--first", type=int, default=1, help="the seed of the first order (default 1)")
    parser.add_argument("--workers", type=int, default=2, help="workers of pytest-xdist (default 2)")
    parser.add_argument(
        "--journal", type=Path, help="a line for each order that was run; those in it are not run again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
