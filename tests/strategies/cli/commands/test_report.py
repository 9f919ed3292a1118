import errno
import json
import os

import pytest

from strategies.cli.commands.report import run
from strategies.cli.options import ReportOptions
from tests.strategies.journals import begin, lines, write


@pytest.fixture
def journal(tmp_path):
    return write(tmp_path / "s.jsonl", begin(), lines())


def refused(capsys, path, out, code=2):
    assert run(ReportOptions(path, out)) == code
    said = capsys.readouterr().err
    assert said.startswith("localtensor report: ") and said.count("\n") == 1
    return said


def test_the_page_is_written_whole(journal, tmp_path, capsys):
    assert run(ReportOptions(journal, tmp_path / "r.html")) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>") and "s.jsonl" in text
    out, err = capsys.readouterr()
    assert out == ""  # where the page may go
    assert err == f"{tmp_path / 'r.html'} shows 4 findings, of 21 rule instances on 4 overloads.\n"


def test_one_finding_is_no_findings(tmp_path, capsys):
    journal = write(tmp_path / "s.jsonl", begin(), lines()[:7])
    assert run(ReportOptions(journal, tmp_path / "r.html")) == 0
    assert "r.html shows 1 finding, of" in capsys.readouterr().err


def test_an_older_page_is_written_over(journal, tmp_path):
    (tmp_path / "r.html").write_text("old")
    assert run(ReportOptions(journal, tmp_path / "r.html")) == 0
    assert "old" not in (tmp_path / "r.html").read_text(encoding="utf-8")[:3]


def test_a_journal_that_tested_nothing_is_no_success(tmp_path, capsys):
    empty = write(tmp_path / "s.jsonl", begin(), [])
    assert f"nothing was tested in it. {tmp_path / 'r.html'} says why." in refused(
        capsys, empty, tmp_path / "r.html", 3
    )
    assert "Nothing was tested" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_line_that_was_cut_is_told(journal, tmp_path, capsys):
    with journal.open("a") as file:
        file.write('{"kind":"un')
    assert run(ReportOptions(journal, tmp_path / "r.html")) == 0
    assert "last line was cut" in capsys.readouterr().err
    assert "last line was cut" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_journal_that_is_not_there(tmp_path, capsys):
    assert "it cannot be read (No such file" in refused(capsys, tmp_path / "none.jsonl", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("text", ["", "hello\n", "{}\n", "\x00\xff\n", '{"kind":"begin","format":99}\n', "[1]\n"])
def test_what_is_no_journal(text, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text(text)
    assert "x.jsonl" in refused(capsys, tmp_path / "x.jsonl", tmp_path / "r.html")


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "unit", "unit": "nonsense"},
        {"kind": "settled", "rule": "x", "verdict": "odd"},
        {"kind": "settled", "rule": 3, "verdict": "cleared"},
    ],
)
def test_a_line_of_a_stranger(line, tmp_path, capsys):
    path = write(tmp_path / "s.jsonl", begin(), [*lines(), line])
    assert "a line does not hold what a journal's does" in refused(capsys, path, tmp_path / "r.html")


def test_a_first_line_without_what_a_run_is(tmp_path, capsys):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"kind": "begin", "format": begin()["format"]}) + "\n")
    assert "KeyError" in refused(capsys, path, tmp_path / "r.html")


def test_a_folder_that_is_not_there_or_is_the_page_itself(journal, tmp_path, capsys):
    assert f"there is no folder {tmp_path / 'no'}" in refused(capsys, journal, tmp_path / "no" / "r.html")
    assert "is a folder" in refused(capsys, journal, tmp_path)
    assert "it cannot be (File name too long)" in refused(capsys, journal, tmp_path / ("n" * 300))


@pytest.mark.parametrize(("number", "code", "remedy"), [
    (errno.EROFS, 2, "Name a file of yours."), (errno.ENOSPC, 3, "Make room, or name a file elsewhere."),
])  # fmt: skip
def test_a_place_that_cannot_be_written(journal, capsys, monkeypatch, tmp_path, number, code, remedy):
    def fails(path, text):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("strategies.cli.commands.report.atomic_files.write_whole", fails)
    said = refused(capsys, journal, tmp_path / "r.html", code)
    assert f"it cannot be written ({os.strerror(number)}). {remedy}\n" in said
