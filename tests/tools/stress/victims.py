"""The commands that are stopped, small ones: what each needs in its folder, and what has to be true of its files."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.stress.struck import COMMAND, Left, faults, struck

RULES = """
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

@torch.library.custom_op("stressed::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@double.register_fake
def _(x):
    return torch.empty_like(x)

@torch.library.custom_op("stressed::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)

@total.register_fake
def _(x):
    return torch.empty_like(x)

@register_sharding(torch.ops.stressed.double.default)
def double_rules(x):
    return [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]

@register_sharding(torch.ops.stressed.total.default)
def total_rules(x):
    return [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]

def samples(op):
    for n in (1, 2, 3, 4):
        yield (torch.arange(float(n * 3)).reshape(n, 3),), {}
"""
SCRIPT = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    x = torch.ones(2)
    dist.all_reduce(x)
    time.sleep(0.02)
print("sum", x[0].item())
dist.destroy_process_group()
"""
PROGRAM = """
import localtensor as lt
import torch
import torch.distributed as dist

def total(x):
    dist.all_reduce(x)
    return x

if __name__ == "__main__":
    for _ in range(3):
        lt.run(total, torch.ones(2), ranks=2, on="gloo")
"""
TESTS = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("n", range(6))
def test_total(n):
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == 2
"""


@dataclass(frozen=True)
class Victim:
    """`codes` are those of a run that nobody stops; `whole` says what is wrong with the files; `python` is what runs."""

    name: str
    words: Sequence[str]
    codes: Sequence[int] = (0,)
    files: Sequence[tuple[str, str]] = ()
    needs: Sequence[str] = ()
    whole: Callable[[Path, Left], list[str]] = lambda folder, left: []
    python: str = COMMAND
    ours: bool = True
    """Whether it is a command of ours, which answers with our sentence and 130."""

    def prepare(self, folder: Path, store: Path) -> None:
        """The folder as the command wants it: new, with copies of what `needs` names in the store."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in self.files:
            (folder / name).write_text(text)
        for name in self.needs:
            shutil.copy(store / name, folder / name)


def _jsons(*names: str) -> Callable[[Path, Left], list[str]]:
    """These are whole, or not there; and nothing else begins with a dot or a half name."""

    def look(folder: Path, left: Left) -> list[str]:
        found = []
        for name in names:
            file = folder / name
            if file.exists() and file.suffix == ".json":
                try:
                    json.loads(file.read_text())
                except ValueError as error:
                    found.append(f"{name} is no JSON: {error}")
            elif file.exists() and not file.read_text().endswith("\n"):
                found.append(f"{name} has no end")
        return found + [f"{name} was left" for name in os.listdir(folder) if name.startswith(".") and name not in OWN]

    return look


OWN = (".tmp", ".tmp.count", ".localtensor-cache", ".pytest_cache", ".hypothesis")

VALIDATE = ("validate", "--rules", "my_rules", "--ranks", "2", "--dtype", "float64", "--workers", "2")
TINY = (("my_rules.py", RULES),)
VICTIMS = {victim.name: victim for victim in (
    Victim("version", ("--version",)),
    Victim("validate", (*VALIDATE, "--json", "r.json", "--repro", "scripts"), (1,), TINY, whole=_jsons("r.json")),
    Victim("journal", (*VALIDATE, "--journal", "j.jsonl"), (1,), TINY, whole=_jsons()),
    Victim("cumprod", ("validate", "cumprod", "--ranks", "2", "--dtype", "int64", "--journal", "j.jsonl", "--confirm", "none"), (0, 1), whole=_jsons()),
    Victim("plans", ("validate", "--plans", "--mesh", "2", "--samples", "5", "--json", "p.json", "--planner", "greedy"), (0, 1), whole=_jsons("p.json")),
    Victim("gate", ("gate", "--rules", "my_rules", "--ranks", "2", "--accept", "known", "--json", "g.json", "--junit", "g.xml", "--sarif", "g.sarif.json", "--summary", "g.md"), (0,), TINY, whole=_jsons("g.json", "g.sarif.json", "g.md", "localtensor-baseline.json")),
    Victim("gate update", ("gate", "--rules", "my_rules", "--ranks", "2", "--update", "--no-cache"), (1,), TINY, whole=_jsons("localtensor-baseline.json")),
    Victim("run threads", ("run", "-n", "2", "train.py"), (0,), (("train.py", SCRIPT),)),
    Victim("run gloo", ("run", "-n", "2", "--on", "gloo", "train.py"), (0,), (("train.py", SCRIPT),)),
    Victim("discover", ("discover", "aten.mv.default", "--ranks", "2", "--workers", "2"), (0,)),
    Victim("plan", ("plan", "f32[8,8] @ dp=2,tp=2: S(0),R -> R,S(1)", "--picture", "p.svg"), (0,), whole=_jsons("p.svg")),
    Victim("races once", ("races", "--schedules", "200", "--json", "r.json"), (0,), whole=_jsons("r.json")),
    Victim("races dtensor", ("races", "--target", "dtensor", "--schedules", "1", "--seconds", "25", "--json", "r.json"), (0, 1, 3), whole=_jsons("r.json")),
    Victim("report", ("report", "j.jsonl", "-o", "r.html"), (0,), needs=("j.jsonl",), whole=_jsons("r.html")),
    Victim("merge", ("merge", "j.jsonl", "--out", "m.jsonl", "--json", "m.json"), (1,), needs=("j.jsonl",), whole=_jsons("m.json", "m.jsonl")),
    Victim("coverage", ("coverage", "c.jsonl", "--json", "c.json"), (0,), needs=("c.jsonl",), whole=_jsons("c.json")),
    Victim("cost check", ("cost", "check", "torch", "--mesh", "2,2", "--json"), (0, 1)),
    Victim("lt.run gloo", (), (0,), (("program.py", PROGRAM),), python="import os, runpy; runpy.run_path(os.path.abspath('program.py'), run_name='__main__')", ours=False),
    Victim("pytest", ("-q", "-p", "no:cacheprovider", "test_it.py"), (0,), (("test_it.py", TESTS),), python="import pytest, sys; sys.exit(pytest.main())", ours=False),
    Victim("pytest -n 2", ("-q", "-n", "2", "-p", "no:cacheprovider", "test_it.py"), (0,), (("test_it.py", TESTS),), python="import pytest, sys; sys.exit(pytest.main())", ours=False),
)}  # fmt: skip


def stored(folder: Path) -> Path:
    """A folder with the journals that some of the victims read: made once."""
    store = folder / "store"
    if not (store / "c.jsonl").exists():
        made = folder / "making"
        VICTIMS["journal"].prepare(made, store)
        struck(VICTIMS["journal"].words, made)
        store.mkdir(exist_ok=True)
        shutil.copy(made / "j.jsonl", store / "j.jsonl")
        VICTIMS["cumprod"].prepare(made, store)
        struck(VICTIMS["cumprod"].words, made)
        shutil.copy(made / "j.jsonl", store / "c.jsonl")
    return store


def verdicts(journal: Path) -> list[str]:
    """What the journal says of each unit and rule, without how long it took, in one order."""
    lines = map(json.loads, journal.read_text().splitlines())
    return sorted(json.dumps({k: v for k, v in line.items() if k != "seconds"}, sort_keys=True) for line in lines)


def resumed(victim: Victim, folder: Path, *, cold: bool) -> list[str]:
    """What is wrong with going on: it has to end as a run that nobody stopped, with the same lines."""
    words = [*victim.words, *(["--resume"] if (folder / "j.jsonl").exists() else [])]
    left = struck(words, folder, None, cold=cold)
    found = faults(left, None, victim.codes)
    return found + (
        []
        if found or verdicts(folder / "j.jsonl") == verdicts(folder.parent / f"whole {victim.name}.jsonl")
        else ["other verdicts"]
    )
