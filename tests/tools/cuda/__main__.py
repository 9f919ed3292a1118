"""`make cuda`: the whole sweep on a GPU beside the same on the CPU, in under ten minutes; on a machine without one it says so.

At once: the sweep on either device with a journal each, and the training programs of the tests with their tensors on the GPU.
Then the rules that are judged otherwise on one device, confirmed on real processes there; what of DTensor's rules was tested on
the GPU; and how often the simulation and real processes disagree.  Real processes share the GPU where there is no GPU for each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from strategies.base import journal
from strategies.base.signals import EXIT_INTERRUPTED
from strategies.inputs import gathering
from strategies.model.verdict import digest
from tests.tools.command_line import parser_of
from tests.tools.cuda.agreement import agreement
from tests.tools.cuda.differs import UNTRIED, by_op, confirmed, crashes, differing

NOTHING = 3
"""The exit code where there is no GPU: nothing was tested."""
EXAMPLES = """examples:
  python -m tests.tools.cuda                          everything, into ./cuda-report
  python -m tests.tools.cuda --ops add mul            two operators: a first look, a minute
  python -m tests.tools.cuda --seconds 200            each part is stopped after 200 s, and what it tried is compared
  python -m tests.tools.cuda --out DIR --resume       goes on with the journals of DIR
"""
DEVICES = ("cuda", "cpu")
PROGRAMS = "tests/end_to_end/programs"
PLUGIN = "localtensor.pytest_plugin"
CONFIRMATION_SECONDS, AGREEMENT_SECONDS = 60.0, 30.0
CASES = 150
"""Cases of the comparison of simulation and real processes."""


def main() -> int:
    asked = _asked()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if not torch.cuda.is_available():
        console.print(
            f"no GPU: torch {torch.__version__} sees no CUDA device here, so nothing was tested", style="bold"
        )
        return NOTHING
    asked.out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus >= max(asked.ranks) else "gloo"
    console.print(f"torch {torch.__version__}, {gpus} x {torch.cuda.get_device_name(0)}, real processes over {backend}")
    end = time.monotonic() + asked.seconds + CONFIRMATION_SECONDS
    with _Part("programs", _programs(asked), asked, LOCALTENSOR_TEST_DEVICE="cuda") as programs:
        runs = _sweeps(console, asked)
        _compare(console, runs, asked.out, {"cuda": backend, "cpu": "gloo"}, end)
        if not asked.ops:
            _print_coverage(console, asked.out)
        _agreement(console, asked.out, runs["cuda"], backend)
        return 0 if _programs_pass(console, programs) else 1


def _asked() -> argparse.Namespace:
    parser = parser_of("cuda", EXAMPLES, __doc__)
    parser.add_argument("--out", type=Path, default=Path("cuda-report"), help="folder of the journals and the report")
    parser.add_argument("--ops", nargs="+", default=[], help="these operators only; all by default")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3], help="sizes of the mesh")
    parser.add_argument("--seconds", type=float, default=330, help="the most that a sweep or the programs may take")
    parser.add_argument("--resume", action="store_true", help="go on with the journals in --out")
    parser.add_argument("--programs", nargs="*", default=[PROGRAMS], help="the tests to run; none without a word")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4
    parser.add_argument("--cores", type=int, default=cores, help="shared by the parts that run at once")
    return parser.parse_args()


class _Part:
    """A part in a process of its own, whose output goes to a file.  It is interrupted when its time is up, and ends itself."""

    def __init__(self, name: str, words: list[str], asked: argparse.Namespace, **environment: str) -> None:
        self.name, self.log, self.words = name, asked.out / f"{name}.log", words
        self.start, self.seconds, self.cut = time.monotonic(), asked.seconds, False
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
            )

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def code(self) -> int:
        """Its exit code, at the latest some seconds after its time is up."""
        for limit in (max(0.0, self.start + self.seconds - time.monotonic()), 20.0):
            try:
                return self.process.wait(limit)
            except subprocess.TimeoutExpired:
                self.cut = True
                self.process.send_signal(signal.SIGINT)  # the journal is whole, and --resume goes on with it
        self.__exit__()
        return self.process.returncode

    def took(self) -> str:
        return f"{time.monotonic() - self.start:.0f} s{', cut' if self.cut else ''}"


def _programs(asked: argparse.Namespace) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rfE",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--durations=15",
    ]
    workers = ["-n", str(max(1, 3 * asked.cores // 8)), "--dist", "worksteal"]
    installed = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", PLUGIN]  # in a clone that is not installed
    return [*words, *plugin, *workers, *asked.programs] if asked.programs else [sys.executable, "-c", ""]


def _sweep(asked: argparse.Namespace, device: str) -> list[str]:
    """One sweep, as a user runs it; what is wrong on one device alone is confirmed afterwards."""
    path = asked.out / f"{device}.jsonl"
    words = [sys.executable, "-m", "strategies", "validate", *(asked.ops or ["--all"]), "--confirm", "none"]
    words += ["--ranks", *map(str, asked.ranks), "--device", device, "--journal", str(path)]
    words += ["--json", str(asked.out / f"{device}.json")]
    # A worker on the GPU waits for it much of the time.
    workers = 3 * asked.cores // 4 if device == "cuda" else asked.cores // 4
    words += ["--workers", str(max(1, workers))]
    return words + (["--resume"] if asked.resume and path.exists() else [])


def _sweeps(console: Console, asked: argparse.Namespace) -> dict[str, journal.JournalLines]:
    """Both sweeps at once; their journals.  Raises RuntimeError if the tool failed."""
    parts = {device: _Part(device, _sweep(asked, device), asked) for device in DEVICES}
    found = {}
    try:
        for device, part in parts.items():
            code, path = part.code(), asked.out / f"{device}.jsonl"
            said = (part.log.read_text().strip().splitlines() or [""])[-1]
            begun = path.exists() and path.stat().st_size
            if code not in (0, 1, NOTHING, EXIT_INTERRUPTED) or not begun:
                raise RuntimeError(f"{' '.join(part.words)} ended with code {code}: {said}")
            found[device] = journal.load_journal(path)
            units = sum(1 for _ in journal.lines_of_kind(found[device].lines, "unit"))
            console.print(f"{device}: {part.took()}; {units} units; {said}", markup=False)
    finally:
        for part in parts.values():
            part.__exit__()
    return found


def _compare(
    console: Console, runs: dict[str, journal.JournalLines], out: Path, backends: dict[str, str], until: float
) -> None:
    found, both = differing(runs["cpu"].lines, runs["cuda"].lines)
    alone = sum(one.cpu.verdict == UNTRIED for one in found)
    console.print(
        f"{both} rules tried on both; judged otherwise on CUDA than on the CPU: {len(found) - alone}; "
        f"wrong on CUDA and not tried on the CPU: {alone}"
    )
    lines = {device: runs[device].lines for device in DEVICES}
    found = confirmed(found, lines, backends, until=until)
    told = [{"rule": d.rule, "cpu": [d.cpu.verdict, d.cpu.why], "cuda": [d.cuda.verdict, d.cuda.why]} for d in found]
    (out / "differs.json").write_text(json.dumps(told, indent=1) + "\n")
    table = Table()
    for column in ("rule", "cpu", "cuda"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(one.rule, *(f"{w.verdict} {w.why[:200]}".strip() for w in (one.cpu, one.cuda)))
    if found:
        console.print(table)
    for line in by_op(found):
        console.print(line, markup=False)
    dead = crashes(runs["cuda"].lines)
    console.print(f"{len(dead)} overloads crash on CUDA on some sample")
    for op, error in sorted(dead.items()):
        console.print(f"  {op}: {error[:200]}", markup=False)


def _print_coverage(console: Console, out: Path) -> None:
    words = [sys.executable, "-m", "strategies", "coverage", str(out / "cuda.jsonl")]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
    console.print(done.stdout, markup=False)


def _agreement(console: Console, out: Path, run: journal.JournalLines, backend: str) -> None:
    asked = {name: value for name, value in run.begin.items() if name not in _NOT_ASKED}
    kept = gathering.read_samples(
        gathering.samples_path(out / "cuda.jsonl"), digest([sorted(asked.items())]), set(run.begin["ops"])
    )
    samples = {op: found for op, (found, _) in (kept or {}).items()}
    until = time.monotonic() + AGREEMENT_SECONDS
    seen = agreement(samples, device="cuda", backend=backend, most=CASES, until=until)
    console.print(f"simulation against {backend}: {len(seen.apart)} of {seen.cases} cases apart ({seen.share:.1f} %)")
    for line in seen.apart:
        console.print(f"  {line}", markup=False)


_NOT_ASKED = ("kind", "format", "shard", "ops", "trials", "ignored")
"""What a journal's first line holds beside what the run was asked."""


def _programs_pass(console: Console, part: _Part) -> bool:
    """Whether the training programs of the tests, rank threads and lockstep, are right with tensors on the GPU."""
    code = part.code()
    said = part.log.read_text().strip().splitlines()
    shown = [line for line in said if line.startswith(("FAILED", "ERROR"))] + said[-1:]
    console.print(f"programs on CUDA tensors, {part.took()}: " + "\n  ".join(shown), markup=False)
    return code == 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    sys.exit(main())
