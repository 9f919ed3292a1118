"""Random redistributions, planned, carried out, and held to the definition: `split(assemble(held, src), dst)`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import Progress

from tests.tools.command_line import parser_of
from tests.tools.plans.trials import Trial, batch, by_ranks, every_step, in_lists, in_lockstep, trials, tried

EXAMPLES = """examples:
  python -m tests.tools.plans                             100,000 on lists of tensors, every eighth in lockstep, too
  python -m tests.tools.plans --count 0 --real 2000       on gloo processes
  python -m tests.tools.plans --count 0 --threads 2000    on rank threads
  python -m tests.tools.plans --count 0 --steps           every legal step from every spec of small meshes, alone
  python -m tests.tools.plans --replay 0/35               one again, every way, with its plan

Exit code 1 if anything is wrong; each is a line that says what replays it."""
BATCH = 250
"""Numbers that one worker takes at a time."""
TOGETHER = 100
"""Redistributions that one run of ranks carries out."""
TELL = 10_000
"""Where there is no progress bar, a line for so many."""
RANKS = 8
"""The largest mesh that real ranks are asked for."""
SMALL = ([(2,), (3,), (2, 2), (3, 2)], [(), (5,), (4, 3)], [torch.float32, torch.int64])
"""Where every step is tried: meshes, shapes, dtypes."""
CUBE = ([(2, 2, 2)], [(5,)], [torch.float32])


def main() -> int:
    asked = _asked()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if asked.replay:
        return _replay(console, asked.replay, asked.ranks)
    failures, done = list[str](), 0
    for title, total, work in _parts(asked):
        start, before = time.perf_counter(), len(failures)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            bar, count = progress.add_task(title, total=total), 0
            for number, found in work:
                if not console.is_terminal and (count + number) // TELL > count // TELL:
                    console.print(f"{title}: {count + number:,} so far, {len(failures) - before} wrong")
                count += number
                failures += found
                progress.update(bar, completed=count)
                for text in found:
                    console.print(text, markup=False)
        done += count
        took = time.perf_counter() - start
        console.print(f"{title}: {count:,} redistributions, {len(failures) - before} wrong, {took:.0f} s")
    if not done:
        console.print("nothing was asked for", style="red")
    return 1 if failures or not done else 0


Found = Iterator[tuple[int, list[str]]]
"""How many were tried, and what is wrong with them."""


def _parts(asked: argparse.Namespace) -> Iterator[tuple[str, int | None, Found]]:
    if asked.count:
        yield "lists", asked.count, _drawn(asked)
    if asked.steps:
        yield "every step", None, _steps()
    if asked.threads:
        yield "threads", asked.threads, _on_ranks(asked.seed, asked.threads, "threads")
    if asked.real:
        yield "gloo", asked.real, _on_ranks(asked.seed, asked.real, "gloo")


def _drawn(asked: argparse.Namespace) -> Found:
    """In batches, which two processes share."""
    starts = range(asked.first, asked.first + asked.count, BATCH)
    batches = [range(start, min(start + BATCH, asked.first + asked.count)) for start in starts]
    job = partial(batch, asked.seed, asked.ranks, asked.lockstep)
    if asked.workers < 2:
        yield from map(job, batches)
        return
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(job, batches)


def _steps() -> Found:
    for some in (SMALL, CUBE):
        for trial in every_step(*some):
            yield 1, [found for way in (in_lists, in_lockstep) if (found := tried(way, trial))]


def _on_ranks(seed: int, count: int, on: str) -> Found:
    """In worlds of four or of eight ranks, a hundred at a time: the processes are used again."""
    waiting: dict[int, list[Trial]] = {4: [], RANKS + 2: []}
    for trial in trials(seed, range(count), RANKS):
        pile = waiting[4 if trial.one.world <= 4 else RANKS + 2]
        pile.append(trial)
        if len(pile) == TOGETHER:
            yield TOGETHER, _together(pile, on)
            pile.clear()
    for pile in waiting.values():
        if pile:
            yield len(pile), _together(pile, on)


def _together(pile: Sequence[Trial], on: str) -> list[str]:
    try:
        return by_ranks(pile, on)
    except Exception as error:  # why: as above; the first of the pile says where to look
        return [f"{pile[0].one.replay} and {len(pile) - 1} more on {on}: {type(error).__name__}: {error}"]


def _replay(console: Console, text: str, ranks: int) -> int:
    seed, number = map(int, text.split("/"))
    (trial,) = trials(seed, [number], ranks)
    console.print(f"{trial.one}\n{trial.plan}", markup=False)
    found = [tried(in_lists, trial), tried(in_lockstep, trial), *_together([trial], "threads")]
    found += _together([trial], "gloo")
    return _show(console, found)


def _show(console: Console, found: Iterable[str]) -> int:
    wrong = [text for text in found if text]
    for text in wrong:
        console.print(text, markup=False)
    console.print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


def _asked() -> argparse.Namespace:
    parser = parser_of("plans", EXAMPLES, __doc__)
    parser.add_argument("--count", type=int, default=100_000, help="how many on lists (100,000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=24, help="the largest mesh of these (24)")
    parser.add_argument("--lockstep", type=int, default=8, help="each so manieth in lockstep, too (8; 0: none)")
    parser.add_argument("--real", type=int, default=0, help="how many on gloo processes")
    parser.add_argument("--threads", type=int, default=0, help="how many on rank threads")
    parser.add_argument("--steps", action="store_true", help="every legal step alone")
    parser.add_argument("--workers", type=int, default=2, help="processes for --count (2)")
    parser.add_argument("--replay", metavar="SEED/NUMBER", help="one again; draws of ranks need --ranks 8")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
