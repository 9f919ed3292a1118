import json
import os

import pytest

from strategies.cli.commands.report import merge_journals
from strategies.cli.options import MergeOptions
from strategies.sweep.aggregate import merged_run, report
from strategies.sweep.report import text_and_json
from tests.strategies.sweep.report.test_text_and_json import check_schema
from tests.strategies.sweep.test_aggregate import line, settled, unit
from tests.strategies.sweep.test_aggregate_shards import SHARDS, begun, lines_of, written


@pytest.fixture
def shards(tmp_path):
    return [written(tmp_path / f"{n}.jsonl", begun((n, SHARDS)), lines_of(n)) for n in range(1, SHARDS + 1)]


def ran(capsys, paths, out=None, json=None, repro=None):
    code = merge_journals(MergeOptions(tuple(paths), out, json, repro))
    return code, *capsys.readouterr()


def test_0_one_report_of_all_shards(shards, capsys, tmp_path):
    code, out, errors = ran(capsys, shards, json=tmp_path / "r.json")
    assert (code, errors) == (0, "")
    assert "12 sound, 0 unsound" in out and "not in this journal" not in out
    body = json.loads((tmp_path / "r.json").read_text())
    check_schema(body)
    assert (body["unfinished"], body["counts"]["instances"], body["exit_code"]) == (0, 48, 0)


def test_1_an_unsound_rule_in_one_of_them(shards, capsys):
    written(shards[1], begun((2, SHARDS)), [*lines_of(2), settled(confirmed_on="gloo")])
    code, out, _ = ran(capsys, shards)
    assert code == 1 and "Unsound: confirmed to give wrong results (1)" in out


def test_2_a_file_that_is_no_journal(shards, capsys, tmp_path):
    (tmp_path / "text").write_text("hello\n")
    code, out, errors = ran(capsys, [*shards, tmp_path / "text"])
    assert (code, out) == (2, "")
    assert errors.startswith(f"localtensor merge: JOURNAL: {tmp_path / 'text'}: ") and errors.count("\n") == 1


def test_2_a_journal_of_another_run(shards, capsys):
    written(shards[1], begun((2, SHARDS), seed=4), lines_of(2))
    code, out, errors = ran(capsys, shards)
    assert (code, out) == (2, "") and "it is of another run than" in errors


@pytest.mark.parametrize("lacking", ["a journal", "what a shard did"])
def test_3_a_unit_that_is_missing(lacking, shards, capsys, tmp_path):
    if lacking == "what a shard did":
        written(shards[2], begun((3, SHARDS)), [])
    code, out, errors = ran(
        capsys, shards[:2] if lacking == "a journal" else shards, tmp_path / "all", tmp_path / "r.json"
    )
    assert (code, out) == (3, "") and "units are in none of the journals" in errors and errors.count("\n") == 1
    assert not (tmp_path / "r.json").exists() and not (tmp_path / "all").exists()


def test_3_the_same_journal_twice(shards, capsys):
    code, _, errors = ran(capsys, [*shards, shards[0]])
    assert code == 3 and "Name each journal once." in errors


def test_3_shards_that_ran_nothing_at_all(tmp_path, capsys):
    op = unit().op
    units = [line(unit(op, dtypes=dtypes)) for dtypes in ("bool", "complex", "integer", "real")]
    code, out, _ = ran(capsys, [written(tmp_path / "x", begun(None, [op]), units)])
    assert code == 3 and "Nothing was tested: that is not a pass." in out


def test_3_a_place_where_nothing_can_be_written(shards, capsys, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    out = tmp_path / "all.jsonl"
    assert ran(capsys, shards, out) == (3, "", f"localtensor merge: cannot write {out}: No space left on device.\n")
    assert sorted(tmp_path.iterdir()) == sorted(shards)


def test_one_journal_of_the_whole_gives_the_same_report(shards, capsys, tmp_path):
    code, told, _ = ran(capsys, shards, tmp_path / "all.jsonl")
    assert ran(capsys, [tmp_path / "all.jsonl"]) == (code, told, "")
    (begin, lines, _), (other, again, _) = merged_run(shards), merged_run([tmp_path / "all.jsonl"])
    assert text_and_json.as_json(report(begin, lines)) == text_and_json.as_json(report(other, again))


def test_a_line_that_was_cut_is_told(shards, capsys):
    with shards[0].open("ab") as end:
        end.write(b'{"kind":"set')
    code, _, errors = ran(capsys, shards)
    assert (code, errors) == (0, f"{shards[0]}: its last line was cut after 12 bytes; that unit is tried again\n")


def test_scripts_are_written_for_what_is_wrong(shards, capsys, tmp_path):
    written(shards[1], begun((2, SHARDS)), [*lines_of(2), settled(confirmed_on="gloo", script="# {name}\n")])
    code, out, _ = ran(capsys, shards, repro=tmp_path / "scripts")
    (script,) = (tmp_path / "scripts").iterdir()
    assert code == 1 and str(script) in out.replace("\n", "")
