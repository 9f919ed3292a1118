"""`make cuda`: the whole sweep on a GPU beside the same on the CPU; on a machine without one it says so.

Five parts: the sweep on either device with a journal each; the rules that are judged otherwise on one of them; how often
the simulation and real processes disagree; the time beside torch's own validator on that GPU; and the training programs of
the tests with their tensors there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from strategies.base import journal
from strategies.base.signals import EXIT_INTERRUPTED
from strategies.inputs import gathering
from strategies.model.verdict import digest
from tests.tools.command_line import parser_of
from tests.tools.cuda.agreement import agreement
from tests.tools.cuda.differs import crashes, differing

NOTHING = 3
"""The exit code where there is no GPU: nothing was tested."""
EXAMPLES = """examples:
  python -m tests.tools.cuda                          everything, into ./cuda-report
  python -m tests.tools.cuda --ops add mul            two operators: a first look, some minutes
  python -m tests.tools.cuda --seconds 200 --no-peer  each sweep is stopped after 200 s, and what it tried is compared
  python -m tests.tools.cuda --out DIR --resume       goes on with the journals of DIR
"""


def main() -> int:
    asked = _asked()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if not torch.cuda.is_available():
        console.print(
            f"no GPU: torch {torch.__version__} sees no CUDA device here, so nothing was tested", style="bold"
        )
        return NOTHING
    asked.out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus >= max(asked.ranks) else "gloo"
    console.print(f"torch {torch.__version__}, {gpus} x {torch.cuda.get_device_name(0)}, real processes over {backend}")
    runs = {device: _sweep(console, asked, device, backend) for device in ("cuda", "cpu")}
    _compare(console, runs, asked.out)
    _agreement(console, asked.out, runs["cuda"], backend)
    if not asked.no_peer:
        _beside(console, asked.ranks[0])
    return 0 if asked.ops or _programs_pass(console) else 1


def _asked() -> argparse.Namespace:
    parser = parser_of("cuda", EXAMPLES, __doc__)
    parser.add_argument("--out", type=Path, default=Path("cuda-report"), help="folder of the journals and the report")
    parser.add_argument("--ops", nargs="+", default=[], help="these operators only; all by default")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4], help="sizes of the mesh")
    parser.add_argument("--seconds", type=float, help="the most that either sweep may take; without a limit by default")
    parser.add_argument("--resume", action="store_true", help="go on with the journals in --out")
    parser.add_argument("--no-peer", action="store_true", help="leave torch's own validator out")
    return parser.parse_args()


def _sweep(console: Console, asked: argparse.Namespace, device: str, backend: str) -> journal.JournalLines:
    """One sweep, as a user runs it; its journal.  Raises RuntimeError if the tool failed."""
    path = asked.out / f"{device}.jsonl"
    words = [str(Path(sys.executable).parent / "localtensor"), "validate", *(asked.ops or ["--all"])]
    words += ["--ranks", *map(str, asked.ranks), "--device", device, "--journal", str(path)]
    words += ["--confirm", backend if device == "cuda" else "gloo", "--json", str(asked.out / f"{device}.json")]
    words += ["--resume"] if asked.resume and path.exists() else []
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as sweep:
        try:
            out, _ = sweep.communicate(timeout=asked.seconds)
        except subprocess.TimeoutExpired:
            sweep.send_signal(signal.SIGINT)  # the journal is whole, and --resume goes on with it
            out, _ = sweep.communicate()
    said = out.strip().splitlines() or ["stopped by --seconds; what was tried until then is compared"]
    if sweep.returncode not in (0, 1, EXIT_INTERRUPTED) or not path.exists():
        raise RuntimeError(f"{' '.join(words)} ended with code {sweep.returncode}")
    console.print(f"{device}: {time.perf_counter() - start:.0f} s; {said[-1]}", markup=False)
    return journal.load_journal(path)


def _programs_pass(console: Console) -> bool:
    """Whether the training programs of the tests, rank threads and lockstep, are right with tensors on the GPU."""
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "tests/end_to_end/programs"]
    environment = {**os.environ, "LOCALTENSOR_TEST_DEVICE": "cuda"}
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True, env=environment)
    said = done.stdout.strip().splitlines()
    shown = [line for line in said if line.startswith("FAILED")] + said[-1:]
    console.print("programs on CUDA tensors: " + "\n  ".join(shown), markup=False)
    return done.returncode == 0


def _compare(console: Console, runs: dict[str, journal.JournalLines], out: Path) -> None:
    found, both = differing(runs["cpu"].lines, runs["cuda"].lines)
    title = f"{both} rules tried on both; judged otherwise on CUDA than on the CPU: {len(found)}"
    console.print(title)
    table = Table()
    for column in ("rule", "cpu", "cuda"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(one.rule, *(f"{w.verdict} {w.why}".strip() for w in (one.cpu, one.cuda)))
    if found:
        console.print(table)
    dead = crashes(runs["cuda"].lines)
    console.print(f"{len(dead)} overloads crash on CUDA on some sample: {', '.join(sorted(dead)) or 'none'}")
    told = [{"rule": d.rule, "cpu": [d.cpu.verdict, d.cpu.why], "cuda": [d.cuda.verdict, d.cuda.why]} for d in found]
    (out / "differs.json").write_text(json.dumps(told, indent=1) + "\n")


def _agreement(console: Console, out: Path, run: journal.JournalLines, backend: str) -> None:
    asked = {name: value for name, value in run.begin.items() if name not in _NOT_ASKED}
    kept = gathering.read_samples(
        gathering.samples_path(out / "cuda.jsonl"), digest([sorted(asked.items())]), set(run.begin["ops"])
    )
    samples = {op: found for op, (found, _) in (kept or {}).items()}
    seen = agreement(samples, device="cuda", backend=backend, most=200)
    console.print(f"simulation against {backend}: {len(seen.apart)} of {seen.cases} cases apart ({seen.share:.1f} %)")
    for line in seen.apart:
        console.print(f"  {line}", markup=False)


_NOT_ASKED = ("kind", "format", "shard", "ops", "trials", "ignored")
"""What a journal's first line holds beside what the run was asked."""


def _beside(console: Console, ranks: int) -> None:
    for op in ("add", "sum", "mm"):
        ours = _told("tests.tools.bench.ours", "validate", op, "--search", "--ranks", str(ranks), "--device", "cuda")
        peer = _told("tests.tools.bench.peer", "--op", op, "--device", "cuda", "--world-size", str(ranks))
        a, b = (run["combinations"] / max(run["seconds"], 1e-9) for run in (ours, peer))
        times: dict[str, Any] = {"ours": ours["seconds"], "torch's validator": peer["seconds"]}
        shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
        console.print(f"{op} on CUDA, {ranks} ranks: {shown}; {a / b:.0f} times as many combinations a second")


def _told(module: str, *words: str) -> dict[str, Any]:
    """The line of JSON that a runner of `tests.tools.bench` prints; each in a process of its own."""
    done = subprocess.run([sys.executable, "-m", module, *words], check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    sys.exit(main())
