import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import localtensor
from strategies.cli import app as cli
from strategies.cli.commands import report as merging
from strategies.cli.commands import validate
from strategies.cli.options import MergeOptions, ValidateOptions
from tests.strategies import users
from tests.strategies.sweep.report.test_text_and_json import check_schema

ROOT = Path(__file__).parents[3]
START = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from strategies.cli.app import main; main()"


@pytest.fixture
def started(tmp_path):
    """The real command in a process and a session of its own; whoever started us may ignore Ctrl-C, it may not."""
    environ = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE")}
    running = []

    def start(*words):
        running.append(subprocess.Popen(
            [sys.executable, "-c", START, *words], cwd=tmp_path, env=environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ))  # fmt: skip
        return running[-1]

    yield start
    for run in running:
        run.kill()
        run.communicate()


def session_of(leader):
    """The processes of a session that are still alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it is gone by now
                continue
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def assert_session_ends(leader):
    """The fork server learns of its parent's end by the end of a pipe, a moment later."""
    deadline = time.monotonic() + 10
    while left := session_of(leader):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def helped(*words):
    result = CliRunner().invoke(cli.app, [*words, "--help"], terminal_width=200)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def asked(monkeypatch):
    """What the command line hands on, instead of a run."""
    validated = []
    monkeypatch.setattr(validate, "run", lambda chosen: validated.append(chosen) or 0)
    monkeypatch.setattr(ValidateOptions, "check", lambda self: None)
    return validated


def parsed(asked, line):
    result = CliRunner().invoke(cli.app, cli.repeat_options(shlex.split(line)))
    assert result.exit_code == 0, result.output
    return asked.pop()


LEAKS = """
import atexit, sys, {name}
from strategies.cli.app import main
class Leak:
    def __del__(self, write=sys.stderr.write): write("leaked\\n")
sys.leak = Leak()
atexit.register(lambda: print("at exit"))
sys.argv[1:] = {words}
main()
"""


@pytest.mark.parametrize(
    ("words", "code"), [(["--version"], 0), (["validate", "--seed", "x"], 2)], ids=["right", "usage"]
)
@pytest.mark.parametrize("name", ["triton", "another"])
def test_what_triton_leaks_is_not_listed_at_the_end(words, code, name, tmp_path):
    (tmp_path / f"{name}.py").write_text("")
    program = LEAKS.format(words=words, name=name)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "at exit")
    assert ("leaked" in done.stderr) == (name != "triton")


# Without a run.


def test_the_command_line_is_there_before_torch():
    code = "import sys, strategies.cli.app; print(sorted({'torch', 'numpy', 'rich.progress'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_reported():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"localtensor {localtensor.__version__}\n")


@pytest.mark.few(2)
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["validate", "--seed", "x"]], ids=" ".join)
def test_both_packages_are_the_command(words):
    """Word for word, but for the name in the usage."""
    done = {}
    for package in ("localtensor", "strategies"):
        ran = subprocess.run(
            [sys.executable, "-m", package, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        done[package] = (
            ran.returncode,
            *(text.replace(f"-m {package}", "-m PACKAGE") for text in (ran.stdout, ran.stderr)),
        )
    assert done["localtensor"] == done["strategies"]
    assert done["localtensor"][0] == (2 if "x" in words else 0)


def test_the_exit_codes_are_those_of_the_table():
    from strategies.base import signals as leaving
    from strategies.model import verdict as verdicts

    codes = (leaving.EXIT_CLEAN, leaving.EXIT_WRONG, leaving.EXIT_USAGE, leaving.EXIT_NOTHING)
    assert codes == (verdicts.CLEAN, verdicts.WRONG, verdicts.USAGE, verdicts.NOTHING) == (0, 1, 2, 3)


def test_help_of_the_tool_names_its_commands():
    text = helped()
    assert "Tests distributed PyTorch without a cluster" in text
    assert re.search(r"^  validate +Validate sharding rules", text, re.MULTILINE)


def test_help_has_every_option_of_the_page_and_the_exit_codes():
    text = helped("validate")
    table = (ROOT / "docs/validate.md").read_text().partition("## Command line")[2].partition("\n## ")[0]
    options = re.findall(r"^\| `(--[a-z]+)", table, re.MULTILINE)
    assert len(options) > 8
    assert [option for option in options if option not in text] == []
    assert "0 nothing wrong; 1 an Unsound or Refused rule, or a registration that torch ignores; 2 usage;" in text


def test_help_of_merge_has_its_options_examples_and_exit_codes():
    text = helped("merge")
    assert all(option in text for option in ("JOURNAL...", "--out", "--json", "--repro"))
    assert "localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl\n" in text
    assert "2 a file that is no journal, or of another run; 3 a unit is missing." in text


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_merge_hands_on_what_was_given_and_the_exit_code(code, monkeypatch):
    validated = []
    monkeypatch.setattr(MergeOptions, "check", lambda self: None)
    monkeypatch.setattr(merging, "merge_journals", lambda *given: validated.append(given) or code)
    line = "merge a b --out c --json d --repro e"
    assert CliRunner().invoke(cli.app, cli.repeat_options(line.split())).exit_code == code
    assert validated == [(MergeOptions((Path("a"), Path("b")), Path("c"), Path("d"), Path("e")),)]
    assert CliRunner().invoke(cli.app, ["merge"]).exit_code == 2


def test_options_reach_the_run_as_they_were_given(asked):
    chosen = parsed(asked, "validate add 'nn.*' --search --ranks 2 --dtype bool --device cuda --rules a.b --confirm none "
                    "--json x.json --repro y --seed 5 --workers 3 -q")  # fmt: skip
    assert chosen == ValidateOptions(
        ("add", "nn.*"), False, True, (2,), ("bool",), "cuda", "a.b", "dtensor", "none", Path("x.json"), Path("y"), seed=5,
        workers=3, quiet=True,
    )  # fmt: skip


def test_what_is_not_given_has_a_default(asked):
    assert parsed(asked, "validate --all") == ValidateOptions(
        (), True, False, (), (), "cpu", "dtensor", "dtensor", "gloo", None, None, (), False, False, None, "both", None, False, "",
        "", "", 0, None, False,
    )  # fmt: skip


def test_options_of_a_sweep_reach_the_run(asked):
    chosen = parsed(
        asked, "validate --all --mesh 2,2 --mesh=2 --pairs --journal a/j --resume --shard 1/4 --executor dask"
    )
    assert (chosen.mesh, chosen.pairs, chosen.journal, chosen.resume) == (("2,2", "2"), True, Path("a/j"), True)
    assert (chosen.shard, chosen.executor, chosen.ranks) == ("1/4", "dask", ())


def test_a_mesh_may_stand_between_listed_ranks_and_names(asked):
    chosen = parsed(asked, "validate --ranks 2 3 --mesh 2,3 add")
    assert (chosen.ranks, chosen.mesh, chosen.ops) == ((2, 3), ("2,3",), ("add",))


@pytest.mark.parametrize("line", ["--ranks 2 3", "--ranks 2,3", "--ranks 2, 3", "--ranks=2,3", "--ranks 2 --ranks 3"])
def test_ranks_may_be_listed(line, asked):
    assert parsed(asked, f"validate add {line}").ranks == (2, 3)
    assert parsed(asked, f"validate {line} add").ops == ("add",)
    assert parsed(asked, f"validate add {line} --quiet").quiet


@pytest.mark.parametrize("line", ["--dtype bool int64", "--dtype bool,int64", "--dtype bool --dtype int64"])
def test_dtypes_may_be_listed(line, asked):
    assert parsed(asked, f"validate add {line}").dtypes == ("bool", "int64")
    assert parsed(asked, f"validate {line} add").ops == ("add",)


def test_no_workers_are_not_the_default(asked):
    assert parsed(asked, "validate add --workers 0").workers == 0


@pytest.mark.parametrize(("line", "said"), [
    ("validate add --ranks two", "localtensor validate: invalid value for '--ranks': '"),
    ("validate add --ranks", "localtensor validate: option '--ranks' requires an argument."),
    ("validate add --ranks ,", "localtensor validate: invalid value for '--ranks': '"),
    ("validate add --ranks=", "localtensor validate: invalid value for '--ranks': '"),
    ("validate add --dtype", "localtensor validate: option '--dtype' requires an argument."),
    ("validate add --sed 1", "localtensor validate: no such option: --sed. Did you mean --seed?"),
    ("validat add", "localtensor: no such command 'validat'. Did you mean 'validate'?"),
])  # fmt: skip
def test_what_cannot_be_read_is_usage(line, said, asked):
    result = CliRunner().invoke(cli.app, cli.repeat_options(shlex.split(line)))
    assert (result.exit_code, asked) == (2, [])
    assert said in result.output


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_exit_code_is_that_of_the_run(code, monkeypatch):
    monkeypatch.setattr(validate, "run", lambda _: code)
    assert CliRunner().invoke(cli.app, ["validate", "add"]).exit_code == code


@pytest.mark.parametrize(("words", "kept"), [
    ((), "--journal FILE would keep what is done"), (("--journal", "j"), "go on with it by --journal j --resume"),
])  # fmt: skip
def test_ctrl_c_says_how_to_go_on(words, kept, monkeypatch):
    def stopped(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr(validate, "run", stopped)
    result = CliRunner().invoke(cli.app, ["validate", "add", *words])
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == f"localtensor: stopped by Ctrl-C; no report was written; {kept}.\n"


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [(validate, "run", ["validate", "add"]), (merging, "merge_journals", ["merge", "a"])], ids=["validate", "merge"],
)  # fmt: skip
def test_a_failure_of_ours_is_3_with_its_traceback(module, function, words, monkeypatch):
    monkeypatch.setattr(module, function, lambda *_: {}["nothing"])
    monkeypatch.setattr(MergeOptions, "check", lambda self: None)
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 3
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith(
        "KeyError: 'nothing'\n\nlocaltensor itself failed, as shown above; this says nothing about any rule.\n"
    )


# Real runs.


@pytest.mark.slow
def test_a_whole_run_in_a_process_of_its_own(tmp_path, started):
    users.write(tmp_path, "whole_run", users.RIGHT_AND_WRONG)
    run = started("validate", "--rules", "whole_run", "--ranks", "2", "--dtype", "float64", "--workers", "2", "-q",
                  "--json", "report.json", "--repro", "scripts")  # fmt: skip
    out, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (1, "")
    body = json.loads((tmp_path / "report.json").read_text())
    check_schema(body)
    (found,) = body["findings"]
    assert (found["op"], body["exit_code"]) == ("whole_run.running.default", 1)
    assert (tmp_path / found["repro"]).read_text().startswith('"""whole_run.running.default: S(0) -> S(0)\n')
    assert "5 sound, 1 unsound" in out and "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("again: ")) <= 140
    assert_session_ends(run.pid)


SLOW = """
def slow(x):
    open("began", "w").close()
    time.sleep(0.5)
    return x * 2

op("slow", slow, (R, R), (S0, S0))

def samples(op):
    for _ in range(99):
        yield (torch.rand(8, 4),), {}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", ["the command alone", "the whole session"])
def test_ctrl_c_leaves_one_sentence_and_nothing_else(whom, tmp_path, started):
    users.write(tmp_path, "slow_run", SLOW)
    run = started("validate", "--rules", "slow_run", "--workers", "2", "--json", "report.json")
    while not (tmp_path / "began").exists():
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.05)
    assert len(session_of(run.pid)) > 1  # a worker is at work
    if whom == "the command alone":
        os.kill(run.pid, signal.SIGINT)
    else:
        os.killpg(run.pid, signal.SIGINT)  # what a terminal does
    out, errors = run.communicate(timeout=30)
    assert (run.returncode, out) == (130, "")
    kept = "--journal FILE would keep what is done"
    assert errors == f"localtensor: stopped by Ctrl-C; no report was written; {kept}.\n"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["began", "slow_run.py"]
    assert_session_ends(run.pid)
