"""What `torch.compile` and `make_fx` give in lockstep, beside the same programs as they are written."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.tools.command_line import parser_of
from tests.tools.compiled import cost, draws, programs

EXAMPLES = """examples:
  python -m tests.tools.compiled draws                    10,000 programs drawn by Hypothesis, in processes of 250 each
  python -m tests.tools.compiled draws --count 500        a few minutes
  python -m tests.tools.compiled programs                 every whole program of the tests, by aot_eager and inductor
  python -m tests.tools.compiled programs "an mlp"        one of them
  python -m tests.tools.compiled cost                     seconds to compile the step of an MLP, with 1 and with 1,024 ranks

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
    whole = parts.add_parser("programs")
    whole.add_argument("names", nargs="*", help="by default all")
    costing = parts.add_parser("cost")
    costing.add_argument("--backend", default="aot_eager")
    costing.add_argument("--times", type=int, default=3)
    costing.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    for part in (whole, costing):
        part.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    return PARTS[asked.part, asked.here](asked)


def _here(asked: argparse.Namespace) -> int:
    found = draws.drawn(asked.family, asked.seed, asked.count)
    print(json.dumps({"counts": found.counts, "differences": found.differences}))
    return 0


def _program_here(asked: argparse.Namespace) -> int:
    print(json.dumps(programs.compared(*asked.names)))
    return 0


def _programs(asked: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    for name, backend, found in programs.all_compared(asked.names):
        kind = found["outcome"].partition(":")[0]
        counts[f"{backend}: {kind}"] += 1
        more = f", {found['graphs']} graphs, {found['difference']:.2g} of what may differ" if "graphs" in found else ""
        more += ", compiled as a whole" if found.get("whole") else ""
        print(f"{backend:>10}  {name}: {found['outcome']}{more}", flush=True)
    for line, count in sorted(counts.items()):
        print(f"{count:>7,}  {line}")
    return int(any(line.endswith(("RAISES", "DIFFERENT")) for line in counts))


def _cost_here(asked: argparse.Namespace) -> int:
    ranks, backend = asked.names
    print(json.dumps(cost.seconds_to_compile(int(ranks), backend)))
    return 0


def _cost(asked: argparse.Namespace) -> int:
    print(*cost.table(cost.measured((1, 1024), asked.backend, asked.times)), sep="\n")
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


PARTS = {
    ("draws", True): _here, ("draws", False): _draws, ("programs", True): _program_here, ("programs", False): _programs,
    ("cost", True): _cost_here, ("cost", False): _cost,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
