"""`python -m tests.tools.stress [--strikes N] [--seed S] [--cold] [VICTIM...]`: stops each command many times, and looks at what is left."""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.stress.struck import Strike, faults, struck, warm
from tests.tools.stress.victims import VICTIMS, Victim, resumed, stored


def main() -> int:
    """1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.stress")
    parser.add_argument("victims", nargs="*", default=list(VICTIMS), metavar="VICTIM", help=", ".join(VICTIMS))
    parser.add_argument("--strikes", type=int, default=10, help="of each victim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="each as a new process, so that imports are struck, too")
    asked = parser.parse_args()
    if not asked.cold:
        warm()
    home = Path(tempfile.mkdtemp(prefix="stress "))  # no TemporaryDirectory: a forked copy of it would remove it
    store = stored(home)
    wrong = sum(_tried(VICTIMS[name], home, store, asked) for name in asked.victims)
    shutil.rmtree(home)
    print(f"{wrong} wrong")
    return int(wrong > 0)


def _tried(victim: Victim, home: Path, store: Path, asked: argparse.Namespace) -> int:
    folder, rng = home / "w", random.Random(f"{asked.seed} {victim.name}")
    victim.prepare(folder, store)
    begin = time.monotonic()
    plain = struck(victim.words, folder, None, python=victim.python, cold=asked.cold)
    took, wrong = time.monotonic() - begin, 0
    _told(victim, "not stopped", plain, problems := faults(plain, None, victim.codes) + victim.whole(folder, plain))
    keeps = (folder / "j.jsonl").exists() and "--journal" in victim.words
    if keeps:
        shutil.copy(folder / "j.jsonl", home / f"whole {victim.name}.jsonl")
    wrong += bool(problems)
    for number in range(asked.strikes):
        strike = drawn(rng, plain.events, took, (number + rng.random()) / asked.strikes)
        victim.prepare(folder, store)
        left = struck(victim.words, folder, strike, python=victim.python, cold=asked.cold)
        problems = faults(left, strike, victim.codes if victim.ours else range(-15, 130)) + victim.whole(folder, left)
        if not victim.ours:  # Python's own answer: a traceback of the program's; SIGTERM between calls leaves folders
            hard = strike.number == signal.SIGTERM or strike.times > 1
            problems = [one for one in problems if "Traceback" not in one and not (hard and "TMPDIR" in one)]
        if keeps and not problems:
            problems = resumed(victim, folder, cold=asked.cold)
        _told(victim, str(strike), left, problems)
        wrong += bool(problems)
    return wrong


def drawn(rng: random.Random, events: int, took: float, at: float) -> Strike:
    """One that comes about so far (0 to 1) into the run."""
    number = signal.SIGTERM if rng.random() < 0.25 else signal.SIGINT
    when = (int(at * events) + 1, 0.0) if rng.random() < 0.6 else (0, at * took)
    return Strike(*when, number, group=rng.random() < 0.6, times=2 if rng.random() < 0.2 else 1)


def _told(victim: Victim, strike: str, left: object, problems: list[str]) -> None:
    code = getattr(left, "code", None)
    print(f"{victim.name}: {strike}: exit code {code}" + "".join(f"; WRONG: {one}" for one in problems), flush=True)
    if problems:
        print(
            "   | " + f"{getattr(left, 'out', '')[-1500:]}{getattr(left, 'err', '')[-2500:]}".replace("\n", "\n   | "),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
