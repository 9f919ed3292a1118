"""What the README, CONTRIBUTING and the pages in docs/ tell a newcomer to type is typed here, and does what they say."""

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import localtensor
from tests.tools import warm

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
OURS = ("$ localtensor", "$ make", "$ pytest", "$ python")

# Each command of a page stands in one of these two tables.
EXIT_CODES = {
    "make help": 0,
    "localtensor validate --help": 0,
    "localtensor validate gather": 1,
    "localtensor validate --rules my_rules": 1,
    "localtensor validate --rules my_rules --repro scripts": 1,
    "python same_both_ways.py": 0,
    "localtensor run -n 4 hangs.py": 1,
    "localtensor run -n 4 hangs_no_more.py": 0,
    "localtensor run -n 4 --on gloo hangs_no_more.py": 0,
    "localtensor run -n 8 --trace run.json --html run.html --summary train.py 0.5": 0,
    "localtensor run -n 8 train.py 0.5": 0,
    "localtensor run -n 8 --schedule shuffled:7 train.py 0.5": 0,
    "localtensor run -n 2 --on gloo train.py 0.5": 0,
    'localtensor run -n 4 --faults "kill={2: 1}, restart=True" train.py 0.5': 0,
    "localtensor run -n 2 -m train 0.5": 0,
    "localtensor run --help": 0,
    "localtensor discover aten.mv.default --emit": 0,
    "localtensor gate --rules my_rules": 1,
    'localtensor gate --rules my_rules --accept "issue 12: needs a scan over ranks" --expires 2099-12-31': 0,
    "python overlaid.py": 0,
    "python compare.py": 0,
    "python implicit.py": 0,
    "python how_it_runs.py": 0,
    'localtensor plan "f32[4096,4096] @ dp=4,tp=8: P(sum),S(0) -> S(0),R"': 0,
    "localtensor cost check torch": 1,
    "localtensor races": 0,
    "localtensor races --target propagate --schedules 300": 0,
    "pytest test_mean.py": 1,
    "pytest test_mean_fixed.py": 0,
    "pytest test_mean_fixed.py --rank-flaky 10": 0,
    "pytest test_mean_fixed.py --ranks-on gloo": 0,
    "pytest test_running_sum.py": 0,
    "pytest test_layers.py": 0,
    "pytest test_layers.py --rank-schedule shuffled:7 --rank-seed 1": 0,
    "pytest test_layers.py --rank-flaky 10": 0,
    "pytest test_layers.py -k everywhere --ranks-on gloo": 0,
    "pytest test_scale.py": 0,
    "pytest test_squares.py": 1,
    "pytest test_block.py": 0,
    "pytest test_summed.py": 1,
    "pytest test_pipeline.py": 0,
    "localtensor compare replicas.py -n 2 --html page.html": 0,
}
VERSION = metadata.version("torch")
ON_EVERY_TORCH = (
    "localtensor validate gather",
    "localtensor validate --rules my_rules",
    "localtensor run -n 4 hangs.py",
    "pytest test_mean.py",
)
"""What a newcomer types first does the same whichever torch pip brings: `python -m tests.tools.versions` finds such faults."""
MOST_LINES = 200
"""Of the README: what else there is to know has a page in docs/."""
TOLD_OF_TORCH = tuple(f"localtensor {word}" for word in ("validate", "discover", "gate", "cost", "plan", "races"))
SLOW = {
    "localtensor races",
    "localtensor races --target propagate --schedules 300",
    "localtensor validate --rules my_rules --repro scripts",
    "localtensor discover aten.mv.default --emit",
    "localtensor run -n 4 --on gloo hangs_no_more.py",  # as "-n 2 --on gloo train.py"
    'localtensor gate --rules my_rules --accept "issue 12: needs a scan over ranks" --expires 2099-12-31',  # as gate/test_story
    "pytest test_layers.py --rank-flaky 10",  # as that of test_mean_fixed.py
    "pytest test_layers.py -k everywhere --ranks-on gloo",  # as that of test_mean_fixed.py
}
"""Commands of pages in docs/ that take long, and that other tests run on smaller cases."""
TOO_SLOW = {
    "localtensor validate --all --pairs --mesh 2,2 --mesh 2,3 --mesh 2,2,2 --journal sweep.jsonl": "takes many minutes",
    "localtensor validate --all --journal 1.jsonl --shard 1/4": "takes minutes",
    "localtensor validate --source spmd_types --all --repro scripts": "takes minutes",
    "localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl --json report.json": "joins what the others wrote: test_help has some",
    "localtensor causes sweep.jsonl --repro scripts --json causes.json": "reads what the full sweep wrote",
    "localtensor coverage sweep.jsonl": "reads what the full sweep wrote: test_help has a small one",
    "localtensor gate --rules my_rules --changed origin/main --budget 5m": "needs a repository: test_help has one",
    "localtensor gate --rules my_ops.rules --changed origin/main": "needs a repository: tests/end_to_end/gate has one",
    "localtensor report sweep.jsonl -o report.html": "reads what the full sweep wrote: tests/end_to_end/browser has a page",
    "pytest -p localtensor.torch_suites test_of_somebody_else.py": "is somebody else's: tests/localtensor/torch_suites has such files",
    "localtensor races --target dtensor --repro scripts": "takes minutes",
    "localtensor validate --plans --mesh 2,2 --mesh 2,3 --repro scripts": "takes a minute: tests/tools/plans judges fewer pairs",
    'python -m strategies.ops convolution "nn*" --seeds 1': "takes minutes: test_help tries one overload",
    "python -m strategies.ops --coverage": "takes minutes",
    "make setup": "installs torch: every other target of make begins with it",
    "make mutants": "takes half an hour",
    "make flaky": "takes hours",
    "make branches": "takes half an hour",
    "make validate": "installs torch, then judges every rule",
    "make rules": "takes tens of minutes",
    "make bench": "runs torch's own validator beside ours",
    "make check": "formats, lints and tests the whole tree",
    "make test": "runs this test, and would run itself",
}


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The commands of ours in the console blocks, continued lines joined."""
    lines = "\n".join(fences(text, "console")).replace("\\\n", " ").splitlines()
    return [" ".join(line[2:].split()) for line in lines if line.startswith(OURS)]


def unaccounted(text: str) -> list[str]:
    known = {*EXIT_CODES, *TOO_SLOW}
    found = [f"{command} is on a page and in neither table" for command in commands(text) if command not in known]
    return found + [f"{command} is in a table and on no page" for command in sorted(known - {*commands(text)})]


def examples(text: str) -> dict[str, str]:
    """The python blocks that begin with the name of their file, by that name."""
    found: dict[str, str] = {}
    for block in fences(text, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            assert found.setdefault(name[1], block) == block, f"two files are called {name[1]}"
    return found


def write_examples(text: str, folder: Path) -> None:
    for name, block in examples(text).items():
        (folder / name).write_text(block)


def shown(text: str) -> dict[str, str]:
    """Commands that a block shows with what they print."""
    blocks = (block.removeprefix("$ ").partition("\n") for block in fences(text, "console"))
    return {command: words for command, _, words in blocks if words and not words.startswith("$ ")}


def like(words: str) -> str:
    """A pattern of a page's words, in which `...` is anything."""
    return re.escape(words).replace(re.escape("..."), ".*")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PATH"] = bin_first
    if command.startswith("make"):
        return subprocess.run(command.split(), cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    return warm.run(shlex.split(command), cwd=folder, env=environ)


def test_every_command_is_run_or_says_why_not():
    assert commands(README.read_text())
    assert unaccounted(TEXT) == []


def is_slow(command: str) -> bool:
    """Commands of pages whose output no page shows are run by `make docs`, and not by each commit."""
    return command in SLOW or command not in {*commands(README.read_text()), *shown(TEXT)}


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.slow) if is_slow(one) else one for one in EXIT_CODES]
)
def test_the_command_ends_with_the_code_that_we_promise_and_prints_what_is_shown(command, tmp_path):
    if (
        not VERSION.startswith("2.13.")
        and command not in ON_EVERY_TORCH
        and (command.startswith(TOLD_OF_TORCH) or command in shown(TEXT))
    ):
        pytest.skip(f"the pages say what torch 2.13 has: this is {VERSION}")
    write_examples(TEXT, tmp_path)
    done = run(command, tmp_path)
    assert done.returncode == EXIT_CODES[command], done.stdout[-2000:] + done.stderr[-2000:]
    assert (done.stdout + done.stderr).strip()
    assert "Traceback" not in done.stderr
    if command in shown(TEXT):
        said = re.sub(
            r" +$", "", done.stdout + done.stderr, flags=re.MULTILINE
        )  # a table's head has the width of the table
        assert re.fullmatch(like(shown(TEXT)[command]), said, re.DOTALL), f"the page shows something else than\n{said}"


def test_some_pages_show_what_a_command_prints():
    readme = {"pytest test_mean.py", "localtensor run -n 4 hangs.py", "localtensor validate --rules my_rules"}
    assert readme <= {*shown(README.read_text())}
    assert {"python overlaid.py", "python how_it_runs.py"} <= {*shown(TEXT)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_console_block_begins_with_a_command(page):
    assert [block for block in fences(page.read_text(), "console") if not block.startswith("$ ")] == []


def test_a_newcomer_has_the_start_and_a_failure_explained_on_the_first_screens():
    lines = README.read_text().splitlines()
    heads = [line for line in lines if line.startswith("## ")]
    assert len(lines) < MOST_LINES
    assert "\n".join(lines).index("$ pip install") < "\n".join(lines).index("\n## ")
    assert next(n for n, line in enumerate(lines) if line.startswith("First cause: rank ")) < 50
    assert heads[:4] == [
        "## A test on four ranks", "## A program that hangs", "## A wrong sharding rule", "## What it found in torch",
    ]  # fmt: skip


def test_every_command_and_name_that_the_readme_mentions_is_one_that_is_run_or_public():
    mentioned = re.findall(r"(?<!`)`((?:localtensor|pytest) [^`]*)`", README.read_text())
    assert len(mentioned) > 4
    known = [*EXIT_CODES, *TOO_SLOW]
    assert [command for command in mentioned if not any(one.startswith(command) for one in known)] == []
    names = re.findall(r"\blt\.(\w+)", README.read_text())
    assert len(names) > 2 and [name for name in names if name not in localtensor.__all__] == []


def test_a_planted_command_in_no_table_is_caught():
    planted = "```console\n$ localtensor conjure \\\n    --all\noutput\n$ ls\n```\n```python\n$ make love\n```\n"
    assert commands(planted) == ["localtensor conjure --all"]
    assert "localtensor conjure --all is on a page and in neither table" in unaccounted(planted)
    assert "make help is in a table and on no page" in unaccounted(planted)


def test_a_planted_command_that_fails_is_caught(tmp_path):
    write_examples("```python\n# shown.py\nraise SystemExit(7)\n```\n```python\nno_name = 1\n```\n", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["shown.py"]
    assert run("python shown.py", tmp_path).returncode == 7


def test_a_planted_difference_in_what_is_shown_is_caught():
    page = shown("```console\n$ python a.py\none\n...\nthree\n```\n```console\n$ python b.py\n$ python c.py\n```\n")
    assert page == {"python a.py": "one\n...\nthree\n"}
    assert re.fullmatch(like(page["python a.py"]), "one\n2\n2\nthree\n", re.DOTALL)
    assert not re.fullmatch(like(page["python a.py"]), "one\ntwo\nfour\n", re.DOTALL)
