"""Findings of a sweep, checked by hand: plain torch beside DTensor on gloo processes, without the tool that found them."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tools.by_hand.words import BUG, FALSE, RIGHT, Check
from tests.tools.command_line import parser_of
from tests.tools.versions import ranks

EXAMPLES = """examples:
  python -m tests.tools.by_hand                     every check; a line for each
  python -m tests.tools.by_hand cumprod "mse loss"  those whose name or finding has one of these words
  python -m tests.tools.by_hand --list              what each is about, without running it
  python -m tests.tools.by_hand.draw sweep.jsonl    the findings that are drawn by lot from a sweep

Exit code 0 if every finding shows and neither a control nor a false alarm does, 1 if not (on another torch: what it has repaired), 2 for a wrong word.
"""
EQUAL, DIFFERS, RAISES, APART = "equal", "differs", "raises on every rank", "some ranks raise"
HANGS, NO_CHECK = "does not return", "plain torch refuses"
SCRIPT = Path(__file__).with_name("rank.py")


def outcome(check: Check) -> tuple[str, str]:
    """What the check came to on gloo, and its words in one line."""
    os.environ["BY_HAND"] = check.name
    return outcome_of(ranks.run(str(SCRIPT), check.ranks))


def outcome_of(answer: Mapping[str, Any]) -> tuple[str, str]:
    """The same from the exit code of each rank, and the output of the first that failed."""
    codes = answer["codes"]
    lines = [line for line in answer["output"].splitlines() if line.strip()] or [""]
    if set(codes) == {0}:
        return EQUAL, ""
    if 3 in codes:
        return NO_CHECK, lines[-1]
    if not {-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL}.isdisjoint(codes):
        return HANGS, ""
    if 1 in codes:
        return DIFFERS, lines[-1]
    error = next((line for line in reversed(lines) if "Error" in line and not line.startswith(" ")), lines[-1])
    return (RAISES if set(codes) == {ranks.UNCAUGHT} else APART), error


def holds(check: Check, found: str) -> bool:
    """Whether the outcome is what was judged: a control and a false alarm equal, all else wrong in some way."""
    return (
        found == EQUAL
        if check.judged in (RIGHT, FALSE)
        else found in ((HANGS,) if check.hangs else (DIFFERS, RAISES, APART))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    from tests.tools.by_hand.tables import CHECKS

    chosen = [c for c in CHECKS.values() if not asked.words or any(w in f"{c.name} {c.finding}" for w in asked.words)]
    if not chosen:
        print(f"python -m tests.tools.by_hand: no check has {' or '.join(asked.words)}", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(f"{c.name} | {c.finding or 'control'} | {c.judged}" for c in chosen))
        return 0
    for module in ("numpy", "torch.distributed.tensor.parallel", "torch._dynamo"):  # else each rank imports them
        importlib.import_module(module)
    counts: Counter[tuple[str, bool]] = Counter()
    for check in chosen:
        found, words = outcome(check)
        counts[_kind(check), holds(check, found)] += 1
        print(
            f"{'' if holds(check, found) else 'NOT AS JUDGED: '}{check.name} ({_kind(check)}): {found} {words[:300]}",
            flush=True,
        )
    return _summed(counts)


def _kind(check: Check) -> str:
    return check.judged if check.judged in (BUG, FALSE, RIGHT) else "arguable"


def _summed(counts: Counter[tuple[str, bool]]) -> int:
    import torch

    for kind, what in (
        (BUG, "bugs show"),
        ("arguable", "arguable findings show"),
        (FALSE, "false alarms are equal"),
        (RIGHT, "controls are equal"),
    ):
        if every := counts[kind, True] + counts[kind, False]:
            print(f"torch {torch.__version__}: {counts[kind, True]} of {every} {what}")
    return int(any(count for (_, held), count in counts.items() if not held))


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("by_hand", EXAMPLES, __doc__)
    parser.add_argument("words", nargs="*", help="a part of a check's name or finding")
    parser.add_argument("--list", action="store_true", help="name the checks, run none")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
