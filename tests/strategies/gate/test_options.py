import datetime as dt
import os
from pathlib import Path

import pytest

from strategies.base.options import BadOption
from strategies.gate.options import GateOptions

TODAY = dt.date(2026, 11, 21)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def assert_refused(said, **given):
    with pytest.raises(BadOption) as error:
        GateOptions(**given).last_day(TODAY)
    assert str(error.value) == f"localtensor gate: {said}"


@pytest.mark.parametrize(("text", "seconds"), [
    ("90s", 90), ("5m", 300), ("1h", 3600), ("45s", 45), ("1h30m", 5400), ("2m5s", 125), (" 5m ", 300),
])  # fmt: skip
def test_a_budget_is_a_time_to_come(text, seconds):
    assert GateOptions(budget=text).until(1000.0) == 1000.0 + seconds


def test_without_a_budget_there_is_no_end():
    assert GateOptions().until(1000.0) == 0.0


@pytest.mark.parametrize("text", ["0", "0m", "five", "5 m", "-5m", "m", "1.5h", "5d", "5m1h", "1e3", "٥m", " "])
def test_a_budget_that_is_no_time_is_refused(text):
    assert_refused(f"--budget: {text!r}: this is no time to work in. Write 90s, 5m or 1h.", budget=text)


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_an_empty_reason_is_refused(reason):
    assert_refused(f"--accept: {reason!r}: this is no reason. Say why what is new is accepted.", accept=reason)


def test_a_day_is_the_last_on_which_something_is_accepted():
    assert GateOptions(accept="why", expires="2026-11-21").last_day(TODAY) == TODAY
    assert GateOptions(accept="why").last_day(TODAY) is None


@pytest.mark.parametrize(("given", "said"), [
    ({"expires": "2027-01-01"}, '2027-01-01: nothing is accepted. Give the reason, too: --accept "...".'),
    ({"expires": "2026-11-20", "accept": "x"}, "2026-11-20: that day is past (today is 2026-11-21). Name a day to come."),
    ({"expires": "tomorrow", "accept": "x"}, "tomorrow: this is no date. Write YYYY-MM-DD."),
    ({"expires": "2027-02-29", "accept": "x"}, "2027-02-29: this is no date. Write YYYY-MM-DD."),
])  # fmt: skip
def test_a_day_that_cannot_be_is_refused(given, said):
    assert_refused(f"--expires: {said}", **given)


def test_to_update_and_to_accept_can_be_asked_for_together():
    assert GateOptions(update=True, accept="why").update


@pytest.mark.parametrize(("confirm", "said"), [
    ("none", "an unconfirmed finding fails no gate"), ("mpi", "no such way to confirm"),
])  # fmt: skip
def test_a_gate_that_could_not_fail_is_refused(confirm, said):
    assert_refused(f"--confirm: {confirm}: {said}. Choose gloo or nccl.", confirm=confirm)


def test_all_and_a_module_are_two_questions():
    said = "--all: given: --rules names the rules to judge. Drop one of the two."
    assert_refused(said, everything=True, rules="my_rules")


@pytest.mark.parametrize("option", ["junit", "sarif", "json", "summary"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(option):
    Path("folder").mkdir()
    assert_refused(f"--{option}: folder: this is a folder. Name a file.", **{option: Path("folder")})
    said = f"--{option}: no/x: its folder is not there. Make the folder first, or name another."
    assert_refused(said, **{option: Path("no/x")})


def test_a_file_is_no_place_for_verdicts():
    Path("kept").touch()
    assert_refused(
        "--cache: kept: verdicts are kept in a folder. Name a folder, or pass --no-cache.", cache=Path("kept")
    )


def test_a_reason_that_no_file_takes_is_refused_before_the_work():
    said = r"--accept: 'gr\udcfcn': this is no text in UTF-8. Write it in UTF-8."
    assert_refused(said, accept=os.fsdecode(b"gr\xfcn"))


@pytest.mark.parametrize("option", ["baseline", "cache"])
def test_too_long_a_name_is_refused(option):
    name = "n" * 300
    assert_refused(f"--{option}: {name}: it cannot be (File name too long). Name another.", **{option: Path(name)})


@pytest.mark.parametrize("given", [{"update": True}, {"accept": "known"}])
def test_a_baseline_that_is_to_be_written_and_cannot_be_is_refused_before_the_work(given, monkeypatch):
    Path("b.json").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_refused(
        "--baseline: b.json: its folder cannot be written. Name a file in a folder of yours.",
        baseline=Path("b.json"),
        **given,
    )
    assert GateOptions(baseline=Path("b.json")).baseline == Path("b.json")


def test_a_baseline_in_a_folder_that_is_not_there_is_refused():
    said = "--baseline: no/b.json: its folder is not there. Make the folder first, or name another."
    assert_refused(said, baseline=Path("no/b.json"))


def test_two_options_do_not_write_one_file():
    assert_refused(
        f"--sarif: {Path.cwd() / 'a'}: --junit names the same file. Name another.",
        junit=Path("a"),
        sarif=Path.cwd() / "a",
    )
    said = "--json: b.json: --baseline names the same file. Name another."
    assert_refused(said, json=Path("b.json"), baseline=Path("b.json"))


def test_the_files_asked_for_are_named_by_their_options():
    assert list(GateOptions(json=Path("a"), github=True).files()) == [("--json", Path("a"))]
