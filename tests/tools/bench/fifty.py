"""Fifty small distributed tests, ours under `pytest --ranks 4` beside the same bodies in torch's MultiProcessTestCase."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RANKS, TESTS, TARGET = 4, 50, 50.0
LIMIT = 1800  # seconds for one way

# What each test does; `rank` and `n` (a number that differs from test to test) are there, `world_size` too.
BODIES = (
    """
    x = torch.full((n,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [6.0] * n
    """,
    """
    parts = [torch.empty(n) for _ in range(world_size)]
    dist.all_gather(parts, torch.full((n,), float(rank)))
    assert [part[0].item() for part in parts] == [0.0, 1.0, 2.0, 3.0]
    """,
    """
    x = torch.arange(float(n)) * rank
    dist.broadcast(x, 2)
    assert x.tolist() == [2.0 * i for i in range(n)]
    """,
    """
    out = torch.empty(n)
    dist.reduce_scatter_tensor(out, torch.arange(float(world_size * n)))
    assert out.tolist() == [4.0 * (rank * n + i) for i in range(n)]
    """,
    """
    group = dist.new_group([0, 2])
    x = torch.ones(n)
    if rank in (0, 2):
        dist.all_reduce(x, group=group)
    dist.barrier()
    assert x[0].item() == (2.0 if rank in (0, 2) else 1.0)
    """,
    """
    x = torch.full((n,), float(rank))
    if rank == 0:
        dist.send(x + 7, 1)
    elif rank == 1:
        dist.recv(x, 0)
    assert x[0].item() == (7.0 if rank == 1 else rank)
    """,
    """
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(16.0).reshape(8, 2) * n, mesh, [Shard(0)])
    assert x.to_local().shape == (2, 2)
    assert (x + 1).full_tensor()[7, 1].item() == 15.0 * n + 1
    """,
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    w = distribute_tensor(torch.ones(4 * n, 4), mesh, [Replicate(), Shard(0)])
    y = distribute_tensor(torch.ones(2, 4 * n), mesh, [Shard(0), Shard(1)]) @ w
    assert y.full_tensor().tolist() == [[4.0 * n] * 4] * 2
    """,
    """
    mesh = init_device_mesh("cpu", (world_size,))
    w = distribute_tensor(torch.ones(8, n), mesh, [Shard(0)]).requires_grad_()
    (w * 3).sum().backward()
    assert w.grad.full_tensor().tolist() == [[3.0] * n] * 8
    """,
    """
    found = [None] * world_size
    dist.all_gather_object(found, {"rank": rank, "n": n})
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    """,
)
_HEAD = """import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
"""
_THEIRS = """
from torch.testing._internal.common_distributed import MultiProcessTestCase


class Fifty(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""


@dataclass(frozen=True, slots=True)
class Fifty:
    """Seconds of each whole pytest run; both passed all their tests."""

    ours: float
    theirs: float
    tests: int

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    def figures(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}


def ours(many: int) -> str:
    """A file for `pytest --ranks 4`."""
    tests = [
        f"\n\ndef test_{i}(rank, world_size):\n    n = {1 + i // len(BODIES)}{textwrap.indent(_body(i), '    ')}"
        for i in range(many)
    ]
    return _HEAD + "".join(tests)


def theirs(many: int) -> str:
    """The same tests in torch's own base class, as its own tests use it."""
    begin = (
        "        rank, world_size = self.rank, self.world_size\n"
        "        store = dist.FileStore(self.file_name, world_size)\n"
        '        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)\n'
    )
    tests = [
        f"\n    def test_{i}(self):\n{begin}        n = {1 + i // len(BODIES)}{textwrap.indent(_body(i), '        ')}"
        "        dist.destroy_process_group()\n"
        for i in range(many)
    ]
    return _HEAD + _THEIRS + "".join(tests)


def _body(number: int) -> str:
    return textwrap.dedent(BODIES[number % len(BODIES)])


def timed(text: str, folder: Path, *options: str) -> tuple[float, int]:
    """Seconds of a pytest run of this file, from the start of Python to its end, and how many tests passed."""
    file = folder / "test_fifty.py"
    file.write_text(text)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *options, str(file)]
    start = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=folder)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"pytest {' '.join(options)} failed with {done.returncode}:\n{done.stdout[-3000:]}")
    passed = re.search(r"(\d+) passed", done.stdout)
    return seconds, int(passed[1]) if passed else 0


def compare(console: Console, many: int = TESTS) -> Fifty:
    """Both ways in one run, ours first and last (the median of three), torch's once: it takes minutes."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [timed(ours(many), Path(folder), "--ranks", str(RANKS)) for _ in range(3)]
        console.print(f"ours: {', '.join(f'{seconds:.2f}' for seconds, _ in runs)} s", style="dim")
        their_seconds, their_passed = timed(theirs(many), Path(folder), "-p", "no:localtensor")
    counts = {their_passed, *(passed for _, passed in runs)}
    if counts != {many}:
        raise RuntimeError(f"not all of {many} tests passed both ways: {sorted(counts)}")
    return Fifty(sorted(seconds for seconds, _ in runs)[1], their_seconds, many)


def show(console: Console, found: Fifty) -> None:
    table = Table(title=f"{found.tests} small tests on {RANKS} ranks, whole pytest runs", title_justify="left")
    for name in ("pytest --ranks 4", "torch's MultiProcessTestCase", "times faster"):
        table.add_column(name, justify="right")
    table.add_row(f"{found.ours:.2f} s", f"{found.theirs:.1f} s", f"{found.ratio:.0f} (target {TARGET:.0f})")
    console.print(table)
