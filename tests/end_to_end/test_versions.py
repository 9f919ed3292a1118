"""The table of faults by version of torch, with environments that are this very Python: nothing is installed here."""

import json
import sys
from pathlib import Path

import pytest

from tests.tools.versions.__main__ import main
from tests.tools.versions.environments import VERSIONS, NotAvailable, pins_of

HEAD = '"""{title}\n\nDTensor in torch 2.13.0 gets this wrong.\n\nRun:  torchrun --nproc-per-node 2 {name}.py\n"""\n'
SCRIPTS = {
    "a_shows": "import sys\nsys.exit(1)",
    "b_right": "import sys\nsys.exit(0)",
    "c_gone": "from math import no_such_function",
    "d_trips": "raise ValueError('odd')",
    "e_hangs": "import threading\nthreading.Event().wait()",
}


@pytest.fixture
def folder(tmp_path):
    for name, body in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(HEAD.format(title=f"aten.{name}.default: S(0)", name=name) + body)
    return tmp_path


def here(folder: Path, version: str) -> Path:
    if version == "2.11.0":
        raise NotAvailable("no such wheel")
    return Path(sys.executable)


def run(folder, *more):
    given = [str(folder), "--envs", str(folder / "envs"), "--limit", "2", "--preload", *more]
    return main(given, here)


def test_each_script_is_present_fixed_not_applicable_or_an_error(folder, capsys):
    assert run(folder, "--torch", "2.13.0", "--json", str(folder / "out.json")) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[:7] == [
        "| what | 2.13.0 |", "|---|---|", "| aten.a_shows.default: S(0) | present |",
        "| aten.b_right.default: S(0) | fixed |", "| aten.c_gone.default: S(0) | not applicable |",
        "| aten.d_trips.default: S(0) | error |", "| aten.e_hangs.default: S(0) | present: hangs |",
    ]  # fmt: skip
    assert rows[-1] == "* d_trips.py on 2.13.0: ValueError: odd"
    body = json.loads((folder / "out.json").read_text())
    assert [s["outcomes"]["2.13.0"]["kind"] for s in body["scripts"]] == [
        "present", "fixed", "not applicable", "error", "present: hangs",
    ]  # fmt: skip


def test_a_script_that_no_longer_shows_its_fault_on_the_version_that_it_names_is_named(folder, capsys):
    for name in ("c_gone", "d_trips", "e_hangs"):
        (folder / f"{name}.py").unlink()
    run(folder, "--torch", "2.13.0")
    assert "b_right.py does not show its fault on torch 2.13.0, which it names" in capsys.readouterr().err


def test_a_version_that_cannot_be_installed_is_a_column_that_says_so_and_the_others_run(folder, capsys):
    for name in ("c_gone", "d_trips", "e_hangs"):
        (folder / f"{name}.py").unlink()
    assert run(folder, "--torch", "2.12.1", "2.11.0") == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "| what | 2.11.0 | 2.12.1 |"
    assert "| aten.a_shows.default: S(0) | not available | present |" in out
    assert "* torch 2.11.0 is not available: no such wheel" in out and "torch 2.11.0 is not available" in err


def test_an_unknown_version_is_named_with_the_known_ones(folder, capsys):
    with pytest.raises(SystemExit) as left:
        run(folder, "--torch", "2.13.0", "9.9.9")
    assert left.value.code == 2
    assert f"unknown version 9.9.9; known are {', '.join(VERSIONS)}" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["", '"""No ranks."""\n'], ids=["no script", "no ranks"])
def test_a_folder_without_scripts_and_a_script_without_ranks_are_refused(tmp_path, body, capsys):
    if body:
        (tmp_path / "a.py").write_text(body)
    assert run(tmp_path, "--torch", "2.13.0") == 3
    assert ("holds no script" if not body else "torchrun --nproc-per-node N") in capsys.readouterr().err


def test_each_version_is_installed_with_exact_pins_and_never_with_another_torch():
    for version in VERSIONS:
        pins = pins_of(version)
        assert all("==" in pin for pin in pins) and not any(pin.startswith("torch==") for pin in pins)
