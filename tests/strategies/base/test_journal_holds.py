"""What lines of a journal must hold, and a journal that was refused before its first line."""

import json

import pytest

from strategies.base.journal import load_journal, open_journal
from tests.strategies.base.test_journal import LINES, RUN, assert_refused, written

BAD = "is no line of a journal. It was changed by something else: start anew."
WHOLE = {
    "unit": {"unit": "aten.neg.default alone real 2"}, "settled": {"rule": "r", "verdict": "cleared"},
    "captured": {"crashed": [], "refused": {}},
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "run.jsonl")


def put(file, number, line):
    """The line in the place of that number, counted from 1."""
    rows = file.read_bytes().split(b"\n")
    rows[number - 1] = json.dumps(line).encode()
    file.write_bytes(b"\n".join(rows))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, held in WHOLE.items() for name in held])
def test_a_line_of_a_known_kind_that_lacks_what_is_read_of_it_is_refused_with_its_number(kind, name, file):
    whole = {"kind": kind, **WHOLE[kind]}
    put(file, 3, whole)
    assert load_journal(file).lines[1] == whole
    put(file, 3, {key: value for key, value in whole.items() if key != name})
    assert_refused(file, f"line 3 {BAD}")


def test_a_kind_that_is_not_known_is_kept(tmp_path):
    line = {"kind": "remark", "said": 1}
    assert list(load_journal(written(tmp_path / "x", [line])).lines) == [line]


def test_a_journal_that_was_never_begun_is_dropped_with_its_file_and_nothing_else(tmp_path):
    (tmp_path / "other").write_text("mine")
    with open_journal(tmp_path / "x", resume=False) as journal:
        assert (tmp_path / "x").exists()
        journal.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_journal_that_was_begun_is_not_dropped(resume, tmp_path):
    path = written(tmp_path / "x") if resume else tmp_path / "x"
    with open_journal(path, resume=resume) as journal:
        journal.begin(RUN)
        before = path.read_bytes()
        journal.drop()
    assert path.read_bytes() == before != b""
    with open_journal(path, resume=True) as again:  # it is let go
        assert again.lines == (LINES if resume else [])


def test_without_a_file_there_is_nothing_to_drop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_journal(None, resume=False) as journal:
        journal.drop()
    assert list(tmp_path.iterdir()) == []
