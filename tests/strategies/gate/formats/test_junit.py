from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import strategies
from strategies.gate.formats.junit import junit
from tests.strategies.gate_cases import CLEAN, EVERY, FULL, hostile


@pytest.fixture(scope="module")
def schema():
    """Importing the library takes a third of a second, in each worker if it is done while tests are collected."""
    import xmlschema

    return xmlschema.XMLSchema11(Path(strategies.__file__).parent / "schema/junit.xsd")


def cases(result):
    return {case.get("name"): case for case in ET.fromstring(junit(result)).iter("testcase")}


@pytest.mark.parametrize("which", ["clean", "nothing", "full", "hostile"])
def test_the_text_is_valid_and_readable(schema, which):
    schema.validate(junit(EVERY[which]()))
    assert cases(EVERY[which]())


def test_the_schema_refuses_what_is_wrong(schema):
    text = junit(FULL)
    broken = [
        text.replace('tests="', 'test="', 1), text.replace("<failure", "<oops").replace("</failure", "</oops"),
        text.replace('name="aten.add.Tensor"', 'name="aten.cumprod.default"'), text.replace("12.346", "-1"),
    ]  # fmt: skip
    assert schema.is_valid(text)
    assert [schema.is_valid(one) for one in broken] == [False] * 4


def test_each_overload_is_a_case_with_its_own_outcome():
    outcome = {name: [child.tag for child in case] for name, case in cases(FULL).items()}
    assert outcome == {
        "aten.add.Tensor": [],
        "aten.cumprod.default": ["failure"],
        "aten.gather.default": [],
        "aten.sort.default": ["failure"],
        "aten.topk.default": ["skipped"],
        "aten.var.correction": ["error"],
        "run": ["error"],
    }


def test_the_sums_are_those_of_the_cases():
    suite = ET.fromstring(junit(FULL)).find("testsuite")
    assert suite is not None
    assert {n: suite.get(n) for n in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "7", "failures": "2", "errors": "2", "skipped": "1", "time": "12.346",
    }  # fmt: skip


def test_a_failure_tells_both_rules_their_keys_and_the_picture():
    node = cases(FULL)["aten.cumprod.default"][0]
    assert node.get("message") == "aten.cumprod.default: S(0) -> S(0) (real on 1 axis, complex on 1 axis)"
    assert "S(1) -> S(1) (real on 1 axis)" in (node.text or "")
    assert "  rank 1  [2] of shape (1,)" in (node.text or "")


def test_a_crash_that_is_also_wrong_is_a_failure():
    crash = replace(FULL.report.crashed[0], op="aten.cumprod.default")
    told = cases(replace(FULL, report=replace(FULL.report, crashed=(crash,))))
    assert [child.tag for child in told["aten.cumprod.default"]] == ["failure"]


def test_hostile_text_comes_back_as_it_was_but_for_what_xml_cannot_hold():
    node = cases(hostile())["my.bad.default"][0]
    assert "<script>alert(1)</script>" in (node.text or "")
    assert "]]>" in (node.text or "") and "\x00" not in (node.text or "")


def test_same_result_same_text():
    assert junit(FULL) == junit(FULL) != junit(CLEAN)
