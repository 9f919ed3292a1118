"""Wrong command lines: one sentence, the right exit code, and none of them waits for torch."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from strategies.cli import app as cli

ROOT = Path(__file__).parents[3]
WRONG = {
    # what cannot be read
    "validat add": "localtensor: no such command 'validat'. Did you mean 'validate'?",
    "--verbose": "localtensor: no such option: --verbose. Did you mean --version?",
    "validate add --sed 1": "localtensor validate: no such option: --sed. Did you mean --seed?",
    "validate add --seed x": "localtensor validate: invalid value for '--seed': 'x': input should be a valid integer",
    "validate add --ranks two": "localtensor validate: invalid value for '--ranks': 'two': input should be a valid integer",
    "validate add --ranks": "localtensor validate: option '--ranks' requires an argument.",
    "validate add --workers 1.5": "localtensor validate: invalid value for '--workers': '1.5'",
    "gate cumprod --accept": "localtensor gate: option '--accept' requires an argument.",
    "run": "localtensor run: missing argument 'SCRIPT'.",
    "run -n two train.py": "localtensor run: invalid value for '-n' / '--ranks': 'two'",
    "plan": "localtensor plan: missing argument 'TEXT'.",
    "merge": "localtensor merge: missing argument 'JOURNAL...'.",
    "report": "localtensor report: missing argument 'JOURNAL'.",
    "cost chekc torch": "localtensor cost: no such command 'chekc'. Did you mean 'check'?",
    "cost check": "localtensor cost check: missing argument 'COST'.",
    "races --seconds soon": "localtensor races: invalid value for '--seconds': 'soon'",
    # validate
    "validate": "localtensor validate: OP: nothing named: there is nothing to try.",
    "validate add --all": "localtensor validate: --all: add: ops are named as well.",
    "validate add --ranks 1": "localtensor validate: --ranks: 1: a rule needs at least 2 ranks",
    "validate add --ranks 65": "localtensor validate: --ranks: 65: that many real processes would not fit",
    "validate add --mesh x": "localtensor validate: --mesh: x: this is no mesh.",
    "validate add --mesh 0,2": "localtensor validate: --mesh: 0,2: this is no mesh of several axes.",
    "validate add --mesh 9,9": "localtensor validate: --mesh: 9,9: it has 81 ranks.",
    "validate add --dtype float": "localtensor validate: --dtype: float: this dtype is not among those tried.",
    "validate add --device tpu": "localtensor validate: --device: tpu: unknown device.",
    "validate add --confirm mpi": "localtensor validate: --confirm: mpi: no such way to confirm.",
    "validate add --workers 0": "localtensor validate: --workers: 0: a validation needs at least one worker.",
    "validate add --seed -1": "localtensor validate: --seed: -1: torch's generators do not take it.",
    "validate add --resume": "localtensor validate: --resume: given: there is no journal to go on with.",
    "validate add --shard 1of4": "localtensor validate: --shard: 1of4: this is no shard.",
    "validate add --shard 5/4 --journal j": "localtensor validate: --shard: 5/4: there is no such shard.",
    "validate add --shard 1/4": "localtensor validate: --shard: 1/4: without a journal it cannot be merged",
    "validate add --journal old.jsonl": "localtensor validate: --journal: old.jsonl: it is there already.",
    "validate add --json no/report.json": "localtensor validate: --json: no/report.json: its folder is not there.",
    "validate add --samples 5": "localtensor validate --plans: --samples: --samples 5: this goes with --plans.",
    "validate add --plans": "localtensor validate --plans: options: OP: with --plans this is without meaning.",
    "validate --plans --mesh 0": "localtensor validate --plans: --mesh: '0': a mesh is a size",
    "validate --plans --planner best": "localtensor validate --plans: --planner: 'best': DTensor has no such planner.",
    "validate add --source nowhere": "localtensor validate: --source: 'nowhere': no source has this name.",
    "validate add --source spmdtypes": "localtensor validate: --source: 'spmdtypes': no source has this name. Did you mean spmd_types?",
    "validate --rules my_rules": "localtensor validate: --rules: my_rules: there is no such module.",
    "validate --rules my_rules.py": "localtensor validate: --rules: my_rules.py: there is no such file.",
    "validate --rules a/my_rules": "localtensor validate: --rules: a/my_rules: this is no name of a module.",
    "validate --rules my-rules.py": "localtensor validate: --rules: my-rules.py: `import` takes no file of this name.",
    # gate
    "gate": "localtensor gate: OP: nothing named: there is nothing to try.",
    "gate cumprod --budget 5": "localtensor gate: --budget: '5': a unit is required. Write 5s, 5m or 5h.",
    "gate cumprod --budget soon": "localtensor gate: --budget: 'soon': this is no time to work in.",
    "gate cumprod --confirm none": "localtensor gate: --confirm: none: an unconfirmed finding fails no gate.",
    "gate cumprod --ranks 1": "localtensor gate: --ranks: 1: a rule needs at least 2 ranks",
    "gate cumprod --dtype float": "localtensor gate: --dtype: float: this dtype is not among those tried.",
    "gate cumprod --accept why --expires tomorrow": "localtensor gate: --expires: tomorrow: this is no date.",
    "gate cumprod --expires 2999-01-01": "localtensor gate: --expires: 2999-01-01: nothing is accepted.",
    "gate --rules nothing_here": "localtensor gate: --rules: nothing_here: there is no such module.",
    "gate --rules json --all": "localtensor gate: --all: given: --rules names the rules to judge.",
    "gate cumprod --baseline .": "localtensor gate: --baseline: .: this is a folder.",
    "gate cumprod --junit no/out.xml": "localtensor gate: --junit: no/out.xml: its folder is not there.",
    "gate cumprod --sarif a --json a": "localtensor gate: --json: a: --sarif names the same file.",
    # journals
    "merge none.jsonl": "localtensor merge: JOURNAL: none.jsonl: it cannot be read (No such file or directory).",
    "merge letter.txt": "localtensor merge: JOURNAL: letter.txt: line 1 is no line of a journal.",
    "report none.jsonl": "localtensor report: JOURNAL: none.jsonl: it cannot be read (No such file or directory).",
    "report empty": "localtensor report: JOURNAL: empty: it does not begin as a journal does.",
    "coverage none.jsonl": "localtensor coverage: JOURNAL: none.jsonl: it cannot be read",
    "causes letter.txt": "localtensor causes: JOURNAL: letter.txt: line 1 is no line of a journal.",
    # others
    "run none.py": "localtensor run: script: none.py: there is no such file.",
    "run -m none.at.all": "localtensor run: script: none.at.all: there is no such module.",
    "run -n 0 train.py": "localtensor run: ranks: ranks=0: a group has at least one rank",
    "run -n 2 --on mpi train.py": "localtensor run: on: on='mpi': there is no such way to run.",
    "run -n 2 --schedule best train.py": "localtensor run: schedule: 'best': there is no policy best",
    "run -n 2 --timeout -1 train.py": "localtensor run: timeout: timeout=-1.0: a limit is more than 0 seconds",
    "run -n 2 --trace no/trace.json train.py": "localtensor run: --trace: no/trace.json: its folder is not there.",
    "run -n 2 --html no/run.html train.py": "localtensor run: --html: no/run.html: its folder is not there.",
    "compare": "localtensor compare: missing argument 'SCRIPT'.",
    "compare train.py": "localtensor compare: -n: 1: the script would be compared with itself.",
    "compare none.py -n 2": "localtensor compare: script: none.py: there is no such file.",
    "compare train.py -n 0 --reference train.py": "localtensor compare: ranks: ranks=0: a group has at least one rank",
    "compare train.py -n 2 --reference 'train.py -n x'": "localtensor compare: --reference: 'train.py -n x': -n needs a number",
    "compare train.py -n 2 --reference none.py": "localtensor compare: --reference: none.py: there is no such file.",
    "compare train.py -n 2 --mesh dp=3": "localtensor compare: --mesh: 'dp=3': it has 3 ranks, and the parallel script has 2.",
    "compare train.py -n 2 --html no/page.html": "localtensor compare: --html: no/page.html: its folder is not there.",
    "discover add --ranks 1": "localtensor discover: --ranks: 1: a rule needs at least 2 ranks.",
    "races --target twice": "localtensor races: --target: 'twice': there is no such target.",
    "races --threads 1": "localtensor races: --threads: 1: it has to be 2 or more.",
    "cost check tim": "localtensor cost check: cost: 'tim': there is no such cost. Did you mean time?",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a script, a file of another kind, an empty one and a journal."""
    (tmp_path / "train.py").write_text("print('never')\n")
    (tmp_path / "letter.txt").write_text("Dear reader,\n")
    (tmp_path / "my-rules.py").write_text("")
    (tmp_path / "empty").write_text("")
    (tmp_path / "old.jsonl").write_text('{"kind": "begin", "format": 1}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(line, folder):
    done = CliRunner().invoke(cli.app, cli.repeat_options(shlex.split(line)))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(WRONG[line])
    assert done.stderr.count("\n") == 1 and done.stderr[-2] in ".?", done.stderr


LATE = ("compare", "--source", "--expires", "--trace")
"""Of lines that say these all are tried: what refuses them lies near what imports torch."""
LINES_IN_ONE_PROCESS = """
import json, shlex, sys
from typer.main import get_command
from typer.testing import CliRunner
from strategies.cli import app as cli
for line in json.loads(sys.argv[1]):
    CliRunner().invoke(cli.app, cli.repeat_options(shlex.split(line)))
    if heavy := {"torch", "numpy"} & set(sys.modules):
        raise SystemExit(f"{line} imports {sorted(heavy)}")
"""


def test_none_of_them_imports_torch(folder):
    lines = [
        *[line for i, line in enumerate(WRONG) if i % 3 == 0 or any(word in line for word in LATE)],
        "--help",
        "--version",
        *(f"{name} --help" for name in ("validate", "gate", "run", "cost check")),
    ]
    done = subprocess.run(
        [sys.executable, "-c", LINES_IN_ONE_PROCESS, json.dumps(lines)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_options_of_a_long_help_stand_in_groups():
    text = CliRunner().invoke(cli.app, ["gate", "--help"]).output
    groups = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["Arguments:", "What to judge:", "Meshes:", "Baseline:", "Output:", "Large runs:", "Options:"]
    between = text.partition("What to judge:")[2].partition("Meshes:")[0]
    assert "--rules" in between and "--changed" in between and "--json" not in between


def test_help_is_as_wide_as_the_terminal_up_to_120_columns(monkeypatch, capsys):
    widths = {}
    for columns in (60, 100, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        get_command(cli.app).main(["validate", "--help"], prog_name="localtensor", standalone_mode=False)
        text = capsys.readouterr().out.partition("Examples:")[0]
        widths[columns] = max(map(len, text.splitlines()))
    assert widths[60] <= 60 < widths[100] <= 100 < widths[300] <= 120


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell):
    words = "localtensor validate --jo"
    typed = {
        "COMP_WORDS": words,
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    given = {"_LOCALTENSOR_COMPLETE": f"complete_{shell}", **typed}
    done = CliRunner().invoke(cli.app, [], prog_name="localtensor", env=given)
    assert (done.exit_code, "--journal" in done.output, "--json" in done.output) == (0, True, False)


def test_torch_is_found_where_it_is_imported():
    """The test above would see it."""
    done = subprocess.run(
        [sys.executable, "-c", LINES_IN_ONE_PROCESS.replace("import json", "import numpy, json"), '["--help"]'],
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == "--help imports ['numpy']\n"
