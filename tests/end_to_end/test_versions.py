"""`python -m tests.tools.versions` names what each script showed on each torch, and leaves whole things behind."""

import json
import sys
from pathlib import Path

import pytest

from tests.tools.versions import __main__ as versions
from tests.tools.versions import environments
from tests.tools.versions.environments import READY, VERSIONS, NotAvailable, pins_of, place_of, python_of

HEAD = '"""aten.{op}.default: S(0) -> S(0)\n\nDTensor in torch 2.13.0 gets this wrong: {why}\n\nRun:  torchrun --nproc-per-node 2 x\n"""\nimport os, sys\n'
CAUGHT = "import traceback\ntry:\n    {}\nexcept Exception:\n    traceback.print_exc()\n    os._exit(2)\n"
SHOWN = {
    "cumprod": ("sys.exit(1)", "present"),
    "cumsum": ("assert os.environ['WORLD_SIZE'] == '2' and os.environ['RANK'] in '01'", "fixed"),
    "sgn": ("import os.no_such_module", "not applicable"),
    "fmax": ("from os import no_such_name", "not applicable"),
    "fmin": ("os.no_such_name()", "not applicable"),
    "gather": (CAUGHT.format("os.no_such_name()"), "not applicable"),
    "amax": ("raise NotImplementedError('Operator x does not have a sharding strategy registered.')", "not applicable"),
    "amin": ("import json; json.loads(3)", "error"),
    "any": ("import shlex; shlex.split(5)  # an AttributeError, and not of a name that the script looked for", "error"),
    "std": (CAUGHT.format("raise ValueError('a | b')"), "error"),
    "var": ("raise RuntimeError('the fault')", "present"),
    "max": ("os._exit(7)", "error"),
}  # fmt: skip
"""Scripts by their op: what each does, and what it is then."""


@pytest.fixture
def scripts(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path, scripts):
    """The command with environments that need no installation: each is this Python."""

    def made(folder, version):
        place_of(folder, version).mkdir(parents=True, exist_ok=True)
        return Path(sys.executable)

    def runs(*options, make=made):
        return versions.main([str(scripts), "--envs", str(tmp_path / "envs"), *options, "--preload"], make)

    return runs


def write(folder, op, code, why="it is"):
    (folder / f"{op}.py").write_text(HEAD.format(op=op, why=why) + code)


def rows(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {label: cells for label, *cells in lines}


def test_each_outcome_has_its_word_and_rows_are_in_the_order_of_the_files(run, scripts, tmp_path, capsys):
    for op, (code, _) in SHOWN.items():
        write(scripts, op, code, "rank 1 raises RuntimeError: the fault")
    assert run("--torch", "2.15.0", "2.13.0", "--json", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr()
    head, *table = rows(said.out).items()
    assert head == ("what", ["2.13.0", "2.15.0"])
    assert table == [(f"aten.{op}.default: S(0) -> S(0)", [SHOWN[op][1]] * 2) for op in sorted(SHOWN)]
    assert "* std.py on 2.13.0: ValueError: a \\| b\n" in said.out
    assert "* max.py on 2.13.0: exit codes 7, 7; it printed nothing\n" in said.out
    assert "cumsum.py does not show its fault on torch 2.13.0, which it names\n" in said.err
    assert "cumprod.py does not show" not in said.err
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["torch"] == {"2.13.0": "installed", "2.15.0": "installed"}
    assert [one["script"] for one in data["scripts"]] == [f"{op}.py" for op in sorted(SHOWN)]
    assert data["scripts"][-1]["outcomes"]["2.15.0"] == {"kind": "present", "detail": ""}


def test_a_script_that_waits_for_ever_is_present_and_the_next_one_runs(run, scripts, capsys):
    write(scripts, "amax", "import signal\nsignal.pause()")
    write(scripts, "amin", "sys.exit(0)")
    assert run("--torch", "2.13.0", "--limit", "1") == 0
    assert [*rows(capsys.readouterr().out).values()][1:] == [["present: hangs"], ["fixed"]]


def test_ranks_that_wait_for_one_that_failed_are_ended(run, scripts, capsys):
    write(scripts, "min", "if os.environ['RANK'] == '1': raise KeyError(1)\nimport signal\nsignal.pause()")
    assert run("--torch", "2.13.0", "--limit", "30") == 0
    said = capsys.readouterr().out
    assert [*rows(said).values()][1:] == [["error"]]
    assert "* min.py on 2.13.0: KeyError: 1\n" in said


def test_by_op_counts_the_scripts_of_an_op(run, scripts, capsys):
    for name, op, code in (("1", "amax", "1"), ("2", "amax", "0"), ("3", "amin", "0")):
        (scripts / f"{name}.py").write_text(HEAD.format(op=op, why="") + f"sys.exit({code})")
    assert run("--torch", "2.13.0", "--by-op") == 0
    assert [*rows(capsys.readouterr().out).items()][1:] == [
        ("aten.amax.default", ["present 1 of 2"]),
        ("aten.amin.default", ["fixed"]),
    ]


def test_an_unknown_version_is_named_with_the_known_ones(run, capsys):
    with pytest.raises(SystemExit) as end:
        run("--torch", "2.13.0", "2.99.0")
    assert end.value.code == 2
    assert f"unknown version 2.99.0; known are {', '.join(VERSIONS)}\n" in capsys.readouterr().err


def test_a_version_that_cannot_be_had_is_named_and_the_others_run(run, scripts, capsys):
    def make(folder, version):
        if version == "2.14.1":
            raise NotAvailable("No space left on device")
        return Path(sys.executable)

    write(scripts, "amax", "sys.exit(1)")
    assert run("--torch", "2.13.0", "2.14.1", "2.15.0", make=make) == 3
    said = capsys.readouterr()
    assert [*rows(said.out).values()][1] == ["present", "not available", "present"]
    assert "* torch 2.14.1 is not available: No space left on device\n" in said.out
    assert "torch 2.14.1 is not available: No space left on device\n" in said.err


def test_ctrl_c_keeps_the_versions_that_were_done(run, scripts, tmp_path, capsys):
    def make(folder, version):
        if version == "2.15.0":
            raise KeyboardInterrupt
        return Path(sys.executable)

    write(scripts, "amax", "sys.exit(1)")
    assert run("--torch", "2.13.0", "2.15.0", "-o", str(tmp_path / "out.md"), make=make) == 130
    text = (tmp_path / "out.md").read_text()
    assert rows(text)["what"] == ["2.13.0"]
    assert text.startswith("# ") and "Of 1 faults are present: 1 on 2.13.0.\n" in text
    assert "stopped" in capsys.readouterr().err


def test_clean_removes_the_environments(run, scripts, tmp_path):
    write(scripts, "amax", "sys.exit(1)")
    run("--torch", "2.13.0")
    assert place_of(tmp_path / "envs", "2.13.0").exists()
    run("--torch", "2.13.0", "--clean")
    assert not place_of(tmp_path / "envs", "2.13.0").exists()


@pytest.mark.parametrize("text", [None, "import torch\n", '"""A title, and no number of ranks."""\n'])
def test_a_folder_without_scripts_that_name_their_ranks_is_refused(run, scripts, capsys, text):
    if text:
        (scripts / "amax.py").write_text(text)
    assert run() == 3
    assert ("torchrun --nproc-per-node N" if text else "holds no script") in capsys.readouterr().err


def test_an_environment_without_a_working_python_is_not_available(run, scripts, capsys):
    write(scripts, "amax", "sys.exit(1)")
    assert run("--torch", "2.13.0", make=lambda folder, version: Path("/bin/false")) == 3
    assert "not available" in capsys.readouterr().out


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), NotAvailable("no such version"), OSError(28, "No space left")])
def test_half_an_environment_is_removed_and_a_whole_one_is_made_once(tmp_path, monkeypatch, stop):
    def interrupted(command):
        assert place_of(tmp_path, "2.13.0").exists()
        raise stop

    monkeypatch.setattr(environments, "_run", interrupted)
    with pytest.raises(NotAvailable if isinstance(stop, OSError) else type(stop)):
        python_of(tmp_path, "2.13.0")
    assert not place_of(tmp_path, "2.13.0").exists()
    place_of(tmp_path, "2.13.0").mkdir()
    (place_of(tmp_path, "2.13.0") / "left").touch()  # by a process that was killed
    commands = []
    monkeypatch.setattr(environments, "_run", commands.append)
    assert python_of(tmp_path, "2.13.0") == python_of(tmp_path, "2.13.0")
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert "torch==2.13.0" in commands[1]
    assert sorted(path.name for path in place_of(tmp_path, "2.13.0").iterdir()) == ["pins.txt", READY]


@pytest.mark.parametrize("version", VERSIONS)
def test_pins_are_exact_and_one_for_a_package(version):
    pins = [pin.partition(";")[0].split("==") for pin in pins_of(version) if "<" not in pin]
    assert all(len(pin) == 2 for pin in pins)
    assert "torch" not in dict(pins)
    assert len(dict(pins)) == len(pins)
