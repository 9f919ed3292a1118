import errno
import json
import os

import pytest

from strategies.cli.commands.report import merge_journals, run
from strategies.cli.options import MergeOptions, ReportOptions
from strategies.sweep.aggregate import merged_run, report
from strategies.sweep.report import text_and_json
from tests.properties.test_files_read_law import UNIT
from tests.strategies import gate_cases, journals
from tests.strategies.journals import begin, lines, write
from tests.strategies.sweep.report.test_text_and_json import check_schema
from tests.strategies.sweep.test_aggregate import line, settled, unit
from tests.strategies.sweep.test_aggregate_shards import SHARDS, begun, lines_of, written


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


def test_a_line_that_was_cut_is_reported(journal, tmp_path, capsys):
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
    assert "does not hold what a journal's does" in refused(capsys, path, tmp_path / "r.html")


def merged(path, tmp_path):
    return merge_journals(MergeOptions((path,), json=tmp_path / "m.json", repro=tmp_path / "scripts"))


def test_a_journal_writes_no_script_outside_of_the_folder(tmp_path, capsys):
    rows = [json.loads(json.dumps(row)) for row in lines()]
    line = next(row for row in rows if row["kind"] == "settled" and row.get("script"))
    line["claim"][0] = f"{tmp_path}/evil.a.default"
    path = write(tmp_path / "s.jsonl", begin(ops=["aten.neg.default"], trials=[]), rows)
    assert merged(path, tmp_path) == 2 and "names no overload" in capsys.readouterr().err
    line["claim"][0], line["title"] = "aten.neg.default", f"aten.neg.default on {tmp_path}/../x, then ../../evil"
    path = write(tmp_path / "s.jsonl", begin(ops=["aten.neg.default"], trials=[]), rows)
    assert merged(path, tmp_path) == 1
    assert {one.name for one in tmp_path.iterdir()} == {"s.jsonl", "m.json", "scripts"}
    assert [one.suffix for one in (tmp_path / "scripts").iterdir()] == [".py"]


def test_a_script_does_not_follow_a_link_out_of_the_folder(tmp_path, capsys):
    path = write(tmp_path / "s.jsonl", begin(ops=["aten.neg.default"], trials=[]), lines())
    assert merged(path, tmp_path) == 1
    (script,) = (tmp_path / "scripts").iterdir()
    script.unlink()
    script.symlink_to(tmp_path / "profile")
    assert merged(path, tmp_path) == 3 and f"cannot write {script}" in capsys.readouterr().err
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("change", [
    {"device": "nowhere"}, {"tensors": [["float9", [1], ""]]}, {"tensors": [["float64", [2], "AAAA"]]}, {"op": "a/b.c.d"},
    {"tensors": [["float64", [1], "AAAAAAAAAAA=", None, "nowhere:0"]]}, {"call": [[{"leaf": 7}], []]},
    {"call": [[{"device": "nowhere"}], []]}, {"call": [[{"dtype": "float9"}], []]}, {"tensors": [["float64", [2], "", [1 << 40]]]},
], ids=repr)  # fmt: skip
def test_a_sample_of_a_foreign_journal_is_read_or_refused(change, tmp_path, capsys):
    row = json.loads(json.dumps(UNIT))
    for candidate in (*row["suspects"].values(), *row["whole"].values()):
        candidate[0]["sample"] |= change
    path = write(tmp_path / "s.jsonl", begin(), [*lines(), row])
    if "device" in change:  # a name that a sample does not have
        assert run(ReportOptions(path, tmp_path / "r.html")) == 0
    else:
        assert "a line does not hold what a journal's does (NotEncodable: no sample (" in refused(
            capsys, path, tmp_path / "r.html"
        )


def test_lines_that_are_there_twice_are_not_counted_twice(tmp_path, capsys):
    for row in lines()[1], lines()[6]:
        path = write(tmp_path / "s.jsonl", begin(), [*lines(), row])
        assert "line 13 is of 'aten." in refused(capsys, path, tmp_path / "r.html")
    path = write(tmp_path / "s.jsonl", begin(), [*lines(), begin(), *lines()])
    assert "line 13 begins another run" in refused(capsys, path, tmp_path / "r.html")


def test_half_a_character_is_shown_and_written(tmp_path, capsys):
    rows = [
        *lines(),
        journals.settled(gate_cases.finding("aten.neg.default", reason="\ud800 \x1b[2J\n::error::x", got="\ud800")),
    ]
    path = write(tmp_path / "s.jsonl", begin(ops=["aten.neg.default"], trials=[]), rows)
    assert merged(path, tmp_path) == 1
    out = capsys.readouterr().out
    assert "\\ud800 \\u001b[2J" in out and not any(line.lstrip().startswith("::") for line in out.splitlines())
    assert any(one["got"] == "\ud800" for one in json.loads((tmp_path / "m.json").read_text())["findings"])


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


def test_a_line_of_a_shard_that_was_cut_is_reported(shards, capsys):
    with shards[0].open("ab") as end:
        end.write(b'{"kind":"set')
    code, _, errors = ran(capsys, shards)
    assert (code, errors) == (0, f"{shards[0]}: its last line was cut after 12 bytes; that unit is tried again\n")


def test_scripts_are_written_for_what_is_wrong(shards, capsys, tmp_path):
    written(shards[1], begun((2, SHARDS)), [*lines_of(2), settled(confirmed_on="gloo", script="# {name}\n")])
    code, out, _ = ran(capsys, shards, repro=tmp_path / "scripts")
    (script,) = (tmp_path / "scripts").iterdir()
    assert code == 1 and str(script) in out.replace("\n", "")
