"""What `torch.compile` and `make_fx` give in lockstep, beside the same programs as they are written."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.tools.command_line import parser_of
from tests.tools.compiled import draws

EXAMPLES = """examples:
  python -m tests.tools.compiled draws                    10,000 programs drawn by Hypothesis, in processes of 250 each
  python -m tests.tools.compiled draws --count 500        a few minutes

Exit code 1 if anything differs; a program that ends a process by a signal counts as a difference."""
EACH = 250
"""Programs that one process runs."""


def main() -> int:
    parser = parser_of("compiled", EXAMPLES)
    parts = parser.add_subparsers(dest="part", required=True)
    drawing = parts.add_parser("draws")
    drawing.add_argument("--count", type=int, default=10_000, help="programs, half of each family")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--workers", type=int, default=2)
    drawing.add_argument("--family", choices=list(draws.FAMILIES))
    drawing.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    return _here(asked) if asked.here else _draws(asked)


def _here(asked: argparse.Namespace) -> int:
    found = draws.drawn(asked.family, asked.seed, asked.count)
    print(json.dumps({"counts": found.counts, "differences": found.differences}))
    return 0


def _draws(asked: argparse.Namespace) -> int:
    families = [asked.family] if asked.family else list(draws.FAMILIES)
    tasks = [
        (family, asked.seed + start, min(EACH, asked.count // len(families) - start))
        for start in range(0, asked.count // len(families), EACH)
        for family in families
    ]
    total = draws.Found()
    with ThreadPoolExecutor(asked.workers) as pool:
        for found in pool.map(lambda task: draws.in_a_process(*task), tasks):
            total.add(found)
            print(json.dumps(total.counts), flush=True)
            for key in sorted(found.differences):
                print(f"  {key}\n    {found.differences[key]}", flush=True)
    for name, count in sorted(total.counts.items()):
        print(f"{count:>7,}  {name}")
    return 1 if total.differences else 0


if __name__ == "__main__":
    sys.exit(main())
