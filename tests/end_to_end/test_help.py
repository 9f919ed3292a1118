"""The help of each command has examples, and they are run here, or at least read: `--help` never tells a lie."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from strategies.cli import app as cli
from strategies.cli.commands import coverage
from tests.tools import warm

ROOT = Path(__file__).parents[2]

# Each example of a help stands in one of these two tables.
EXIT_CODES = {
    "localtensor validate --rules my_rules": 1,
    "localtensor gate --rules my_rules": 1,
    'localtensor gate --rules my_rules --accept "issue 12"': 0,
    "localtensor gate --rules my_rules --update": 0,
    "localtensor gate --rules my_rules --sarif out.sarif --github": 0,
    "localtensor gate --rules my_rules --changed origin/main": 0,
    "localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl": 0,
    "localtensor merge *.jsonl --json report.json": 0,
    "localtensor coverage sweep.jsonl": 0,
    "localtensor causes sweep.jsonl --repro scripts": 0,
    "localtensor causes own.jsonl --rules my_rules": 0,
    "localtensor report sweep.jsonl -o report.html": 0,
    "localtensor run -n 8 train.py": 0,
    "localtensor cost rule aten.add.Tensor": 0,
    "localtensor cost rule gather --ranks 8 --json": 0,
    "localtensor run -n 8 train.py --epochs 1": 0,
    "localtensor run -n 4 --schedule shuffled:7 train.py": 0,
    "localtensor run -n 2 -m my_package.train --epochs 1": 0,
    'localtensor plan "f32[8,8] @ dp=2: S(0) -> S(1)"': 0,
    'localtensor plan "f32[64,64] @ dp=2,tp=4: S(0),P(sum) -> R,S(1)"': 0,
    'localtensor plan "i64[7] @ 2,3: S(0)[1],S(0)[0] -> S(0),S(0)" --picture -': 0,
    'localtensor plan "f32[8,8] @ dp=2: S(0) -> R" --picture plan.svg': 0,
    'localtensor plan "f32[8,8] @ 2,8: S(0),S(0) -> S(1),R" --inner 3,300 --outer 5,25': 0,
    'localtensor plan "f32[8,8] @ 2,8: S(0),S(0) -> S(1),R" --by bytes --memory 1MB': 0,
    'localtensor plan "f32[64] @ dp=2,tp=2: P(sum),P(sum) -> R,R" --flattened dp,tp --json': 0,
    "localtensor cost check torch": 1,
    "localtensor cost check time --mesh 2,3 --shape 7,5": 0,
    "localtensor cost check my_package.my_costs:price --json": 0,
    "python -m tests.tools.races.nightly --schedules 1300": 0,
    "python -m tests.tools.races.stress --operations 20000": 0,
    "python -m tests.tools.rankbugs Deadlock works": 0,
}
MINUTES, ELSEWHERE = "takes minutes", "test_readme.py runs it, or the like"
READ = {
    "localtensor compare train.py -n 8": "tests/strategies/cli/commands/test_compare.py",
    'localtensor compare train.py -n 8 --reference "train.py -n 4" -- --steps 2': "tests/strategies/cli/commands/test_compare.py",
    "localtensor validate gather": ELSEWHERE,
    'localtensor validate cumprod gather "nn.functional.*"': MINUTES,
    "localtensor validate --all --json report.json": MINUTES,
    "localtensor validate add --search --ranks 2": "takes a minute",
    "localtensor validate cumprod --repro scripts": ELSEWHERE,
    "localtensor validate --all --journal s.jsonl": MINUTES,
    "localtensor validate --all --journal 1.jsonl --shard 1/4": MINUTES,
    "localtensor validate --plans --mesh 2,2": "takes a minute: tests/tools/plans judges fewer pairs",
    "localtensor validate --all --journal sweep.jsonl": MINUTES,
    "localtensor gate cumprod gather --budget 5m": "takes a minute",
    "localtensor coverage": MINUTES,
    "localtensor causes cumprod nn.functional.mse_loss": "takes a minute",
    "localtensor discover scatter_add": MINUTES,
    "localtensor discover aten.mv.default --emit": ELSEWHERE,
    "localtensor discover aten.mv.default --emit > more.py": ELSEWHERE,
    "localtensor run -n 2 --on gloo train.py": ELSEWHERE,
    "localtensor races": ELSEWHERE,
    "localtensor races --target once --schedules 1000000": "takes a night",
    "localtensor races --target propagate --schedules 300": ELSEWHERE,
    "localtensor races --target dtensor": MINUTES,
    "localtensor races --target dtensor --repro scripts": MINUTES,
    "localtensor races --target dtensor --seconds 120 --json races.json": MINUTES,
}
"""Of the command; those of `python -m` that are not run are read, too, and all for the one reason: they take minutes."""
MODULES = sorted({*re.findall(r"-m ((?:strategies|tests)\.?[\w.]*)", (ROOT / "Makefile").read_text())})

RULES = """
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@torch.library.custom_op("helped::running_sum", mutates_args=())
def running_sum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@running_sum.register_fake
def shape_only(x):
    return torch.empty_like(x)


@register_sharding(torch.ops.helped.running_sum.default)
def rules(x):
    return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
"""
TRAIN = """
import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
dist.init_process_group("gloo")
for epoch in range(parser.parse_args().epochs):
    loss = torch.ones(())
    dist.all_reduce(loss)
    print(f"epoch {epoch}: {loss.item()}")
dist.destroy_process_group()
"""
FILES = {
    "my_rules.py": RULES, "train.py": TRAIN, "my_package/__init__.py": "", "my_package/train.py": TRAIN,
    "my_package/my_costs.py": "def price(src, dst):\n    return float(src != dst)\n",
}  # fmt: skip
QUICK = "-q --ranks 2 --dtype int64 --confirm none --journal"
OWN = f"localtensor validate --rules my_rules {QUICK}"
TORCH = f"localtensor validate aten.neg.default {QUICK}"
BEFORE = {
    "localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl": [f"{OWN} {n}.jsonl --shard {n}/4" for n in range(1, 5)],
    "localtensor coverage sweep.jsonl": [f"{TORCH} sweep.jsonl"],
    "localtensor causes own.jsonl --rules my_rules": [f"{OWN} own.jsonl"],
}
"""What has to be typed before an example."""
DRIVER = """
import contextlib, glob, io, json, shlex, sys, os
sys.path.insert(0, os.getcwd())
from strategies.cli import app as cli
told = {}
for line in json.loads(sys.argv[1]):
    words = [name for word in shlex.split(line)[1:] for name in (sorted(glob.glob(word)) if "*" in word else [word])]
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.app(args=words if words[0] == "run" else cli.repeat_options(words))
        except SystemExit as end:
            code = end.code
    told[line] = (code or 0, out.getvalue())
json.dump(told, open("told.json", "w"))
"""
"""Runs command after command in one process, which imports torch but once."""


def walked(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command of the tree, with the words that lead to it; those that have commands, too."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walked(below, f"{path} {name}")


COMMANDS = [path for path, _ in walked(get_command(cli.app), "localtensor")]


def helped(path: str, width: int = 80) -> str:
    done = CliRunner().invoke(cli.app, [*path.split()[1:], "--help"], prog_name="localtensor", terminal_width=width)
    assert done.exit_code == 0, done.output
    return done.output


def module_help(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    assert entered(module, ["--help"], monkeypatch) == 0
    return capsys.readouterr().out


def entered(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of `python -m module words`, in this process."""
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns
    plain = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
    monkeypatch.setattr(sys, "meta_path", plain)  # pytest's loader has no code for runpy
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    return end.value.code or 0


def examples(text: str, begin: str) -> list[str]:
    """The commands of a help: from the first word to the end of the line, or to two spaces."""
    assert re.search("^ *examples:$", text, re.MULTILINE | re.IGNORECASE), "the help has no examples"
    found = re.findall(rf"^ +({re.escape(begin)}(?: .*)?)$", text, re.MULTILINE)
    return [line.partition("  ")[0] for line in found]


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of each example that is run, in a project of its own."""
    folder = tmp_path_factory.mktemp("helped")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    git(folder, "update-ref", "refs/remotes/origin/main", "HEAD")
    lines = [line for line in EXIT_CODES if line.startswith("localtensor ")]
    typed = json.dumps([word for line in lines for word in (*BEFORE.get(line, ()), line)])
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_", "FORCE_COLOR"))}
    done = warm.run(
        [sys.executable, "-c", DRIVER, typed], cwd=folder, env=environ | {"PYTHONPATH": str(ROOT)}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line: (code, out) for line, (code, out) in json.loads((folder / "told.json").read_text()).items()}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_examples_of_itself_and_each_is_accounted_for(path):
    found = examples(helped(path), path)
    assert found, f"{path} --help has no example of {path}"
    assert [line for line in found if line not in EXIT_CODES and line not in READ] == []


def test_no_table_holds_what_no_help_says():
    said = {line for path in COMMANDS for line in examples(helped(path), "localtensor")}
    assert {line for line in (*EXIT_CODES, *READ) if line.startswith("localtensor")} - said == set()


@pytest.mark.few(14)
@pytest.mark.parametrize("line", [line for line in EXIT_CODES if line.startswith("localtensor ")])
def test_an_example_ends_with_its_code(line, told):
    code, out = told[line]
    assert code == EXIT_CODES[line], out
    assert "Traceback" not in out and "\x1b" not in out


def words_of(line: str) -> list[str]:
    return shlex.split(line.partition(" > ")[0])[1:]


def read(line: str) -> list[dict[str, Any]]:
    """What each command that the line calls is given, instead of its work."""
    heard: list[dict[str, Any]] = []
    tree = get_command(cli.app)
    for _, command in walked(tree, ""):
        if not hasattr(command, "commands"):
            command.callback = lambda **given: heard.append(given)
    tree.main(cli.repeat_options(words_of(line)), prog_name="localtensor", standalone_mode=False)
    return heard


@pytest.mark.parametrize("line", READ)
def test_an_example_that_takes_long_can_be_read(line):
    assert len(read(line)) == 1


def test_a_planted_example_with_an_option_that_is_not_there_is_caught():
    with pytest.raises(Exception, match="No such option: --sead"):
        read("localtensor coverage --sead 5")


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_sixty_columns_but_for_commands_that_cannot_be_broken(path):
    wide = [line for line in helped(path, 60).splitlines() if len(line) > 60]
    assert [line for line in wide if not re.match(r" +localtensor ", line)] == []


# Those of `python -m`.


def test_the_makefile_names_modules():
    assert {"strategies.ops", "tests.tools.bench", "tests.tools.rankbugs"} <= {*MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_make_runs_has_examples_which_it_can_read(module, monkeypatch, capsys):
    found = examples(module_help(module, monkeypatch, capsys), f"python -m {module}")
    assert len(found) > 1
    heard = []

    def read(parser, words=None, namespace=None):
        heard.append(known(parser, words, namespace))
        raise SystemExit(77)

    known = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    for room, name in ((coverage, "validate_ops"), (coverage, "compare_ops")):
        monkeypatch.setattr(room, name, lambda *given, **more: heard.append(given) or 77)
    for line in found:
        assert entered(module, shlex.split(line)[3:], monkeypatch) == 77, line
    assert len(heard) == len(found)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert entered(module, ["--sead"], monkeypatch) != 2


@pytest.mark.parametrize("line", [line for line in EXIT_CODES if line.startswith("python ")])
def test_an_example_of_a_module_ends_with_its_code(line, monkeypatch, capsys):
    _, _, module, *words = shlex.split(line)
    assert line in examples(module_help(module, monkeypatch, capsys), f"python -m {module}")
    assert entered(module, words, monkeypatch) == EXIT_CODES[line]


def test_a_planted_help_without_examples_is_caught():
    with pytest.raises(AssertionError, match="the help has no examples"):
        examples("Usage: localtensor\n\n  localtensor validate cumprod\n", "localtensor")
    text = "Examples:\n\n    localtensor a b\n        words\n    localtensor a    more words\n    localtensor ab\n"
    assert examples(text, "localtensor a") == ["localtensor a b", "localtensor a"]
