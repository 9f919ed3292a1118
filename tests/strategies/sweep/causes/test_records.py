"""Causes as data: what is computed, what the journal keeps of it, and what is read again."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from strategies.base.journal import BadJournal, load_journal
from strategies.base.progress import Progress
from strategies.model.cause import PUBLIC_CALL, RIGHT, SHOWS, read_causes
from strategies.model.settings import Settings
from strategies.sweep import aggregate
from strategies.sweep.causes import pages, records
from strategies.sweep.causes.cause import Case, Cause
from strategies.sweep.causes.reach import severity
from strategies.sweep.session import validate
from strategies.torch_api.rank_runs import RankProcesses
from tests.strategies import journals
from tests.strategies.model.test_cause import SCAN, UNKNOWN
from tests.strategies.sweep.causes.programs import CUMPROD
from tests.strategies.sweep.causes.test_script import FINE

FAULTS = (journals.SILENT.name, journals.LOUD.name, journals.PROGRAM.name)
"""The findings of `journals.lines()` that are faults of torch: its suspect is none."""


@pytest.fixture
def journal(tmp_path):
    return journals.write(tmp_path / "s.jsonl", journals.begin(), journals.lines())


@pytest.fixture(scope="module")
def processes():
    with RankProcesses("gloo") as made:
        yield made


def with_run_of(given, processes, **more):
    cause = Cause(replace(SCAN, verdict="", script="", **more), Case(given, "reason", severity(given, False)))
    return records.with_run(cause, processes)


def test_a_fault_has_its_lines_what_they_print_and_what_is_right(processes):
    found = with_run_of(CUMPROD, processes)
    if found.verdict == RIGHT:
        pytest.skip("this torch is right")
    assert (found.verdict, found.ran_on) == (SHOWS, torch.__version__.split("+")[0])
    assert found.call == "torch.cumprod(f32[4] S(0), -1)" and "torch.cumprod(d0, -1)" in found.lines
    assert "rank 0 got  [1.0, 2.0, 3.0, 12.0]" in found.prints and "24.0" not in found.prints
    assert found.right == "[1.0, 2.0, 6.0, 24.0]"
    assert "Found in torch 2.13.0, torch/x.py:7. It makes 2 findings. With replicas, all 2" in " ".join(
        found.script.split()
    )


def test_a_script_that_does_not_show_its_fault_says_with_which_torch(processes):
    found = with_run_of(FINE, processes, found_on="2.12.1")
    here = torch.__version__.split("+")[0]
    assert (
        found.run_text
        == f"Found on torch 2.12.1, this no longer reproduces: its script shows nothing wrong on torch {here}."
    )


@pytest.mark.parametrize(("mesh", "text"), [
    ("(2,)", "f(x) on 4 ranks\n"), ("(2, 2)", "f(x) on 4 ranks in a mesh of 2x2\n"),
    ("(2, 2, 2), mesh_dim_names=('a', 'b', 'c')", "f(x) on 4 ranks in a mesh of 2x2x2\n"),
])  # fmt: skip
def test_the_case_of_a_page_names_a_mesh_of_several_axes(mesh, text):
    lines = f'mesh = init_device_mesh("cpu", {mesh})\nx0 = (torch.arange(4) % 9).reshape((1, 4))'
    cause = replace(SCAN, call="f(x)", ranks=4, lines=lines)
    report = aggregate.report(journals.begin(), journals.lines())
    assert text in pages.as_text(replace(report, causes=(cause,)))


def test_a_cause_without_a_case_has_no_script(processes):
    found = records.with_run(Cause(UNKNOWN, None), processes)
    assert (found.script, found.verdict, found.run_text) == ("", "", "")


def test_versions_are_those_of_the_row_that_is_of_this_cause():
    gather = replace(SCAN, function="gather_strategy", families=("gather",))
    assert dict(records.known_versions(gather))["2.15.0"] == "present"
    assert dict(records.known_versions(replace(SCAN, families=("cumprod", "cumsum"))))["2.14.1"] == "fixed"
    assert records.known_versions(replace(gather, families=("scatter",))) == ()
    assert records.known_versions(replace(gather, words="an odd thing")) == ()


def test_versions_of_a_public_call_are_found_by_its_public_name(monkeypatch):
    found = ("2.13.0", "present"), ("2.15.0", "fixed")
    made = replace(SCAN, kind=PUBLIC_CALL, key=(PUBLIC_CALL, "parallel.C, modules kept", "values"), families=())
    made = replace(
        made, function="C.__init__", words="wrong values (a training step, shared parameters)", found_on="2.13.0"
    )
    monkeypatch.setattr(records, "_known", lambda: [(*records._title_parts(made.name), found)])
    assert records.known_versions(made) == found
    assert records.known_versions(replace(made, words="wrong values")) == ()


def test_a_script_that_does_not_show_the_fault_where_it_was_found_says_nothing_of_other_versions(monkeypatch):
    name, versions = ("not attributed: squeeze, refused", frozenset()), records._known()[0][2]
    shown = [(version, "present") for version, _ in versions]
    lost = replace(UNKNOWN, words="squeeze, refused", families=())
    assert lost.found_on in dict(versions)
    for here, known in (("present", tuple(shown)), ("present: hangs", None), ("fixed", ())):
        row = tuple((version, here if version == lost.found_on else how) for version, how in shown)
        monkeypatch.setattr(records, "_known", lambda row=row: [(*name, row)])
        assert records.known_versions(lost) == (row if known is None else known)


def test_the_data_of_versions_is_the_table_of_the_documentation():
    from tests.tools.versions.environments import ROOT

    table = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    head, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    data = json.loads(records.KNOWN_VERSIONS.read_text(encoding="utf-8"))
    assert [*data["torch"]] == head[1:]
    told = {row[0].replace("&lt;", "<"): [*row[1:]] for row in rows}
    titles = Counter(one["title"] for one in data["scripts"])
    labels = [f"{t} ({one['script']})" if titles[t := one["title"]] > 1 else t for one in data["scripts"]]
    kept = [[v["kind"] for v in one["outcomes"].values()] for one in data["scripts"]]
    assert dict(zip(labels, kept, strict=True)) == told


def test_kept_causes_are_read_again_and_stand_in_the_report(journal):
    assert records.kept(load_journal(journal)) is None
    before = journal.read_bytes()
    one, other = (
        replace(SCAN, findings=FAULTS[:2]),
        replace(SCAN, id="other", key=("o",), findings=FAULTS[2:], rank=(1,)),
    )
    records.keep(journal, [one, other])
    assert journal.read_bytes().startswith(before)
    read = load_journal(journal)
    assert records.kept(read) == (one, other)
    report = aggregate.report(read.begin, read.lines)
    assert report.causes == (one, other)
    assert [report.cause_of(f) for f in report.findings if f.name == journals.LOUD.name] == [one]
    assert [report.cause_of(f) for f in report.findings if f.name == journals.SUSPECT.name] == [None]


def test_causes_of_other_findings_or_of_another_torch_are_computed_anew(journal, monkeypatch):
    records.keep(journal, [replace(SCAN, findings=FAULTS[:2])])
    assert records.kept(load_journal(journal)) is None
    records.keep(journal, [replace(SCAN, findings=FAULTS)])
    assert records.kept(load_journal(journal)) is not None
    monkeypatch.setattr(records, "torch_version", lambda: "9.9.9")
    assert records.kept(load_journal(journal)) is None


def test_a_merged_journal_has_the_causes_of_its_shards(journal, tmp_path):
    halves = []
    for number, names in ((1, FAULTS[:2]), (2, FAULTS[2:])):
        path = journals.write(tmp_path / f"{number}.jsonl", journals.begin(shard=[number, 2]), journals.lines())
        records.keep(path, [replace(SCAN, findings=names)])
        halves += [line for line in load_journal(path).lines if line["kind"] == "causes"]
    (found,) = read_causes(halves)
    assert found.findings == tuple(sorted(FAULTS))


def test_a_journal_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(BadJournal, match=r"it cannot be opened \(No such file"):
        records.keep(tmp_path / "none" / "s.jsonl", [SCAN])


@pytest.mark.slow
def test_a_real_journal_has_a_cause_for_each_finding(tmp_path):
    path = tmp_path / "s.jsonl"
    validate(Settings(patterns=("aten.cumprod.default",), ranks=(2,), journal=path, workers=1))
    read = load_journal(path)
    found = records.records_of(read.begin, read.lines, workers=1, progress=Progress())
    report = aggregate.report(read.begin, read.lines)
    assert {name for one in found for name in one.findings} == {f.name for f in report.findings}
