"""What the README tells a newcomer to type is typed here, and does what it says."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OURS = ("$ localtensor", "$ make", "$ pytest", "$ python")

# Each command of the README stands in one of these two tables.
EXIT_CODES = {
    "make help": 0,
    "localtensor validate --help": 0,
    "localtensor validate cumprod": 1,
    "localtensor validate --rules my_rules": 1,
    "python same_both_ways.py": 0,
    "localtensor run -n 4 hangs.py": 1,
    "localtensor run -n 8 train.py 0.5": 0,
    "localtensor run -n 8 --schedule shuffled:7 train.py 0.5": 0,
    "localtensor run -n 2 --on gloo train.py 0.5": 0,
    "localtensor run -n 2 -m train 0.5": 0,
    "localtensor run --help": 0,
    "localtensor discover aten.mv.default --emit": 0,
    "localtensor gate --rules my_rules": 1,
    'localtensor gate --rules my_rules --accept "issue 12: needs a scan over ranks" --expires 2099-12-31': 0,
    "python overlaid.py": 0,
    'localtensor plan "f32[4096,4096] @ dp=4,tp=8: P(sum),S(0) -> S(0),R"': 0,
    "localtensor cost check torch": 1,
    "localtensor races": 0,
    "localtensor races --target propagate --schedules 300": 0,
    "pytest test_layers.py": 0,
    "pytest test_layers.py --rank-schedule shuffled:7 --rank-seed 1": 0,
    "pytest test_layers.py --rank-flaky 10": 0,
    "pytest test_layers.py -k everywhere --ranks-on gloo": 0,
    "pytest test_scale.py": 0,
    "pytest test_squares.py": 1,
}
TOO_SLOW = {
    "localtensor validate --all --pairs --mesh 2,2 --mesh 2,3 --mesh 2,2,2 --journal sweep.jsonl": "takes many minutes",
    "localtensor validate --all --journal 1.jsonl --shard 1/4": "takes minutes",
    "localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl --json report.json": "joins what the others wrote",
    "localtensor coverage sweep.jsonl": "reads what the full sweep wrote",
    "localtensor gate --rules my_rules --changed origin/main --budget 5m": "needs a repository: tests/gate has one",
    "localtensor report sweep.jsonl -o report.html": "reads what the full sweep wrote: tests/browser has a page",
    "pytest -p localtensor.torch_suites test_of_somebody_else.py": "is somebody else's: tests/suites has such files",
    "localtensor races --target dtensor --repro scripts": "takes minutes",
    "localtensor validate --plans --mesh 2,2 --mesh 2,3 --repro scripts": "takes a minute: tests/plans judges fewer pairs",
    "make validate": "installs torch, then judges every rule",
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
    found = [f"{command} is in the README and in neither table" for command in commands(text) if command not in known]
    return found + [f"{command} is in a table and not in the README" for command in known - {*commands(text)}]


def write_examples(text: str, folder: Path) -> None:
    """Each python block that begins with its file's name becomes that file."""
    for block in fences(text, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    where = ROOT if command.startswith("make") else folder
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, shell=True, cwd=where, env={**environ, "PATH": bin_first}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_every_command_is_run_or_says_why_not():
    assert commands(README.read_text())
    assert unaccounted(README.read_text()) == []


@pytest.mark.parametrize("command", EXIT_CODES)
def test_the_command_ends_with_the_code_that_we_promise(command, tmp_path):
    write_examples(README.read_text(), tmp_path)
    done = run(command, tmp_path)
    assert done.returncode == EXIT_CODES[command], done.stdout[-2000:] + done.stderr[-2000:]
    assert (done.stdout + done.stderr).strip()
    assert "Traceback" not in done.stderr


def test_what_the_hanging_script_says_is_what_the_readme_shows(tmp_path):
    write_examples(README.read_text(), tmp_path)
    shown = next(block for block in fences(README.read_text(), "console") if "hangs.py" in block)
    command, _, words = shown.partition("\n")
    done = run(command.removeprefix("$ "), tmp_path)
    assert done.stderr == words


def test_what_the_rules_of_our_own_mend_is_what_the_readme_shows(tmp_path):
    write_examples(README.read_text(), tmp_path)
    shown = next(block for block in fences(README.read_text(), "console") if "overlaid.py" in block)
    command, _, words = shown.partition("\n")
    assert run(command.removeprefix("$ "), tmp_path).stdout == words


def test_the_plan_is_what_the_readme_shows(tmp_path):
    shown = next(block for block in fences(README.read_text(), "console") if block.startswith("$ localtensor plan"))
    command, _, words = shown.partition("\n")
    assert run(command.removeprefix("$ "), tmp_path).stdout == words


def test_the_python_sessions_are_true():
    tried = doctest.testfile(str(README), module_relative=False, verbose=False)
    assert tried.attempted > 0
    assert tried.failed == 0


def test_every_console_block_holds_a_command():
    assert all(block.startswith("$ ") for block in fences(README.read_text(), "console"))


def test_a_planted_command_in_no_table_is_caught():
    planted = "```console\n$ localtensor conjure \\\n    --all\noutput\n$ ls\n```\n```python\n$ make love\n```\n"
    assert commands(planted) == ["localtensor conjure --all"]
    assert "localtensor conjure --all is in the README and in neither table" in unaccounted(planted)
    assert "make help is in a table and not in the README" in unaccounted(planted)


def test_a_planted_command_that_fails_is_caught(tmp_path):
    write_examples("```python\n# shown.py\nraise SystemExit(7)\n```\n```python\nno_name = 1\n```\n", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["shown.py"]
    assert run(f"cd {tmp_path} && python shown.py", tmp_path).returncode == 7
