"""`localtensor causes JOURNAL`: computes once, keeps the causes in the journal, and says what could not be written."""

import errno
import io
import json
import os
from dataclasses import replace

import jsonschema
import pytest

from strategies.base import journal as base_journal
from strategies.base.journal import load_journal
from strategies.cli.commands import causes
from strategies.cli.commands.report import merge_journals
from strategies.cli.commands.report import run as report
from strategies.cli.options import CausesOptions, MergeOptions, ReportOptions
from strategies.model.settings import BadRules
from strategies.sweep.causes import records
from tests.strategies import journals
from tests.strategies.gate_cases import finding
from tests.strategies.model.test_cause import SCAN
from tests.strategies.sweep.causes.test_records import FAULTS
from tests.strategies.sweep.report.test_text_and_json import SCHEMA, check_schema
from tests.strategies.sweep.test_aggregate_shards import SHARDS, begun, lines_of, written

ALL = replace(SCAN, findings=FAULTS)


@pytest.fixture
def journal(tmp_path):
    return journals.write(tmp_path / "s.jsonl", journals.begin(), journals.lines())


@pytest.fixture
def computed(monkeypatch):
    """Each computation of causes that the command asks for; all of them find one cause."""
    calls = []

    def compute(begin, lines, **more):
        calls.append(len(lines))
        return (ALL,)

    monkeypatch.setattr(causes, "records_of", compute)
    return calls


def run(path, **more):
    return causes.run(CausesOptions((str(path),), quiet=True, **more))


def test_causes_are_computed_once_and_taken_from_the_journal_afterwards(journal, computed, capsys):
    assert run(journal) == 1
    first = capsys.readouterr().out
    size = journal.stat().st_size
    assert run(journal) == 1 and capsys.readouterr().out == first
    assert len(computed) == 1 and journal.stat().st_size == size
    assert run(journal, again=True) == 1
    assert len(computed) == 2 and journal.stat().st_size > size
    assert "1. scan_strategy: shards with wrong values, for cumprod" in first and "right   2" in first


def test_json_and_scripts_are_the_same_from_a_journal_as_when_computed(journal, computed, tmp_path):
    for name in ("1", "2"):
        assert run(journal, json=tmp_path / f"{name}.json", repro=tmp_path / name) == 1
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    assert (tmp_path / "1/scan_1.py").read_text() == (tmp_path / "2/scan_1.py").read_text() == "# script\n"
    body = json.loads((tmp_path / "1.json").read_text())
    cause = {**SCHEMA["$defs"]["cause"], "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(cause).validate(body["causes"][0])
    assert body["findings"] == 3 and body["causes"][0]["findings"] == list(FAULTS)


def test_the_page_and_the_merged_report_have_the_causes(journal, computed, tmp_path):
    run(journal)
    assert report(ReportOptions(journal, tmp_path / "r.html")) == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'class="cause"' in page and "With replicas, " in page


def test_merge_says_which_cause_each_finding_has(tmp_path):
    paths = [written(tmp_path / f"{n}.jsonl", begun((n, SHARDS)), lines_of(n)) for n in range(1, SHARDS + 1)]
    for number, path in enumerate(paths[:2]):
        found = finding(f"aten.op{number}.default")
        with path.open("a") as file:
            file.write(json.dumps(journals.settled(found)) + "\n")
        records.keep(path, [replace(SCAN, findings=(found.name,))])
    with paths[2].open("a") as file:
        file.write(json.dumps(journals.settled(finding("aten.op2.default"))) + "\n")
    assert merge_journals(MergeOptions(tuple(paths), json=tmp_path / "m.json")) == 1
    body = json.loads((tmp_path / "m.json").read_text())
    check_schema(body)
    assert [one["cause"] for one in body["findings"]] == ["scan_1", "scan_1", None]
    assert [len(one["findings"]) for one in body["causes"]] == [2]


def full(monkeypatch, at):
    """After so many lines the disk is full: writes of the journal take half of a line and refuse the rest."""

    class Full(io.FileIO):
        def write(self, data):
            if len(data) > at:
                return super().write(bytes(data)[:at])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(base_journal, "FileIO", Full)


def test_a_full_disk_leaves_the_journal_whole_and_the_causes_are_printed(journal, computed, capsys, monkeypatch):
    before = journal.read_bytes()
    full(monkeypatch, 100)
    assert run(journal) == 3
    said = capsys.readouterr()
    assert "1. scan_strategy" in said.out
    assert "the causes are not in the journal" in said.err and "No space left on device" in said.err
    assert journal.read_bytes() == before and load_journal(journal).cut == ""


def test_a_journal_of_somebody_else_is_read_and_left_as_it_is(journal, computed, capsys, monkeypatch):
    before = journal.read_bytes()

    def refused(path, made):
        raise base_journal.BadJournal(path, "it cannot be opened (Permission denied)", "Name a file of yours.")

    monkeypatch.setattr(causes, "keep", refused)
    assert run(journal) == 1
    said = capsys.readouterr()
    assert "1. scan_strategy" in said.out and "the causes are not kept in the journal" in said.err
    assert journal.read_bytes() == before


def test_a_journal_that_tested_nothing_is_refused(tmp_path, computed, capsys):
    empty = journals.write(tmp_path / "e.jsonl", journals.begin(), [])
    assert run(empty) == 3
    assert "nothing was tested in it" in capsys.readouterr().err
    assert len(load_journal(empty).lines) == 0


def test_a_line_of_causes_that_this_version_does_not_write_is_named(journal, computed, capsys):
    with journal.open("a") as file:
        file.write(json.dumps({"kind": "causes", "torch": "2.13.0", "shard": None, "causes": [{"colour": 1}]}) + "\n")
    assert run(journal) == 2
    assert "a line does not hold what a journal's does (TypeError" in capsys.readouterr().err


RULES = """
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten.cumprod.default)
def cumprod(*args, **kwargs):
    return [([Replicate()], [Replicate()] + [None] * (len(args) + len(kwargs) - 1))]


open("imported", "w").close()
"""


def test_the_module_that_a_journal_names_is_imported_only_where_the_user_names_it_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_rules.py").write_text(RULES)
    path = journals.write(tmp_path / "s.jsonl", journals.begin(rules="their_rules.py"), journals.lines())
    assert run(path) == 2
    said = capsys.readouterr()
    assert not (tmp_path / "imported").exists() and not said.out
    assert "--rules: dtensor: the journal's rules are those of their_rules.py" in said.err
    assert "Pass --rules their_rules.py if you trust that module." in said.err
    assert run(path, rules="other.py") == 2
    assert "--rules: other.py: the journal's rules are those of their_rules.py" in capsys.readouterr().err
    assert run(path, rules="their_rules.py", workers=1) in (0, 1)
    assert (tmp_path / "imported").exists()


def test_causes_that_a_journal_holds_need_no_module(tmp_path, computed, capsys):
    path = journals.write(tmp_path / "s.jsonl", journals.begin(rules="their_rules"), journals.lines())
    assert run(path, rules="their_rules") == 1
    assert run(path) == 1 and len(computed) == 1
    assert run(path, again=True) == 2 and len(computed) == 1
    own = journals.write(tmp_path / "o.jsonl", journals.begin(), journals.lines())
    capsys.readouterr()
    assert run(own, rules="their_rules") == 2
    assert "the journal's rules are DTensor's own. Leave --rules out." in capsys.readouterr().err


def test_a_module_that_is_not_there_is_refused_for_a_journal_too(tmp_path):
    path = journals.write(tmp_path / "s.jsonl", journals.begin(rules="gone_rules"), journals.lines())
    with pytest.raises(BadRules, match="gone_rules: there is no such module"):
        CausesOptions((str(path),), rules="gone_rules").check()
