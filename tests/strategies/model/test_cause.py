"""A cause as data: what a journal keeps of it, what merged journals make of it, and the sentences on it."""

import json
from dataclasses import replace

import pytest

from strategies.model.cause import (
    FAILED,
    RIGHT,
    SHOWS,
    CauseRecord,
    causes_line,
    data_of,
    of_findings,
    read_cause,
    read_causes,
)

SCAN = CauseRecord(
    "scan_1", ("rule", "scan"), "rule", "shards with wrong values", "2.13.0", ("a", "b"), ops=("aten.cumprod.default",),
    families=("cumprod",), function="scan_strategy", file="torch/x.py", line=7, severity="silent, everyday",
    rank=(0, 0, 0, 1), tried=(("replicas", 2),), call="torch.cumprod(x)", reason="got 1, expected 2", ranks=2,
    lines="x = 1", prints="DTensor gives 1", right="2", verdict=SHOWS, ran_on="2.13.0", script="# script",
)  # fmt: skip
LATER = replace(SCAN, id="later", key=("rule", "later"), findings=("c",), rank=(1, 0, 0, 1), tried=())
UNKNOWN = CauseRecord("u", ("unknown",), "unknown", "add, values", "2.13.0", ("d",))


def line(*records, shard=None, torch="2.13.0"):
    return json.loads(json.dumps(causes_line(records, torch, shard)))


@pytest.mark.parametrize("record", [SCAN, LATER, UNKNOWN])
def test_what_a_journal_keeps_is_the_whole_record(record):
    assert read_cause(json.loads(json.dumps(data_of(record)))) == record
    assert "" not in data_of(UNKNOWN).values()


def test_a_line_of_another_version_is_refused():
    with pytest.raises(TypeError):
        read_cause({**data_of(SCAN), "colour": "red"})


def test_causes_are_read_in_the_order_of_severity_and_unknown_ones_last():
    assert read_causes([line(UNKNOWN, LATER, SCAN)]) == (SCAN, LATER, UNKNOWN)


def test_the_last_computation_counts():
    assert read_causes([line(SCAN), {"kind": "unit"}, line(LATER)]) == (LATER,)
    assert read_causes([{"kind": "unit"}]) == ()


def test_equal_causes_of_two_shards_are_one_with_the_case_of_the_widest_reach():
    other = replace(
        SCAN, id="other", findings=("c",), ops=("aten.cumsum.default",), families=("cumsum",), rank=(1, 0, 0, 1),
        tried=(("replicas", 1),), call="torch.cumsum(x)",
    )  # fmt: skip
    for lines in (
        [line(SCAN, shard=[1, 2]), line(other, shard=[2, 2])],
        [line(other, shard=[2, 2]), line(SCAN, shard=[1, 2])],
    ):
        (found,) = read_causes(lines)
        assert (found.id, found.call, found.findings) == ("scan_1", "torch.cumprod(x)", ("a", "b", "c"))
        assert (found.families, found.tried) == (("cumprod", "cumsum"), (("replicas", 3),))
        assert found.ops == ("aten.cumprod.default", "aten.cumsum.default")
    assert read_causes([*lines, line(LATER)]) == (LATER,)  # computed for all shards together


def test_a_finding_that_is_not_in_the_report_is_left_out():
    assert of_findings((SCAN, LATER), ["b"]) == (replace(SCAN, findings=("b",)),)


def test_the_name_lists_three_families_and_counts_the_rest():
    assert SCAN.name == "scan_strategy: shards with wrong values, for cumprod"
    many = replace(SCAN, families=("a", "b", "c", "d", "e"))
    assert many.what == "shards with wrong values, for a, b, c and 2 more"
    assert UNKNOWN.name == "not attributed: add, values"


@pytest.mark.parametrize(("count", "every", "words"), [
    (1, 1, "With replicas, its one finding is right."), (2, 2, "With replicas, all 2 findings are right."),
    (1, 3, "With replicas, 1 of 3 findings is right."), (2, 3, "With replicas, 2 of 3 findings are right."),
])  # fmt: skip
def test_what_was_tried_is_a_sentence(count, every, words):
    one = replace(SCAN, findings=tuple("abc"[:every]), tried=(("replicas", count),))
    assert one.tried_text == words and one.cured == count
    assert LATER.tried_text == "No replacement of one part of DTensor makes a finding right."


@pytest.mark.parametrize(
    ("verdict", "what"), [(RIGHT, "its script shows nothing wrong"), (FAILED, "its script cannot be run")]
)
def test_a_script_that_no_longer_reproduces_says_so_and_with_which_torch(verdict, what):
    gone = replace(SCAN, verdict=verdict, ran_on="2.15.0")
    assert gone.run_text == f"Found on torch 2.13.0, this no longer reproduces: {what} on torch 2.15.0."
    assert replace(gone, ran_on="2.13.0").run_text == f"On torch 2.13.0 {what}: those of its findings show it."
    assert SCAN.run_text == UNKNOWN.run_text == ""


def test_versions_that_have_the_fault_are_named_and_the_others_with_what_they_do():
    assert SCAN.versions_text == "torch 2.13.0"
    known = replace(SCAN, versions=(("2.9.0", "error"), ("2.12.1", "present: hangs"), ("2.14.1", "fixed")))
    assert known.versions_text == "torch 2.12.1 and 2.13.0; not 2.9.0 (error) and 2.14.1 (fixed)"
    assert replace(SCAN, verdict=RIGHT, ran_on="2.15.0").versions_text == "torch 2.13.0; not 2.15.0 (fixed)"


def test_the_place_is_a_file_and_a_line_or_native_code_or_the_kind():
    assert (SCAN.where, UNKNOWN.where) == ("torch/x.py:7", "unknown")
    assert replace(SCAN, file="", line=0).where == "native code"


@pytest.mark.parametrize("bad", ["../../out", "/out", "a/b", ".hidden", "", "a b", "a\\b", "é"])
def test_an_id_that_is_a_path_is_refused_since_a_script_is_called_after_it(bad):
    assert SCAN.script_name == f"{SCAN.id}.py"
    with pytest.raises(ValueError, match="is no id of a cause"):
        read_cause({**data_of(SCAN), "id": bad})
