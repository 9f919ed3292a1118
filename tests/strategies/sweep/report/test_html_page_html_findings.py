import pytest

from strategies.model.verdict import Verdict
from strategies.sweep.report.html_page import anchor, class_of, show_finding
from tests.strategies.gate_cases import HOSTILE, finding
from tests.strategies.journals import LOUD, PROGRAM, SILENT


def test_a_finding_on_one_axis():
    one = show_finding(SILENT)
    assert (one.trial, one.mesh, one.loudness, one.dtypes, one.meshes, one.columns) == (
        "alone", "2", "silent", ("real", "complex"), ("1 axis",), ("S(0)",),
    )  # fmt: skip
    assert one.call == "cumprod(f64[2], -1)" and len(one.picture) == 2
    assert one.file == "cumprod_default__S0__S0__2ranks.py" and one.script.startswith(f"# run as {one.file}\n")


def test_a_program_on_two_axes_and_one_that_raises():
    one = show_finding(PROGRAM)
    assert (one.trial, one.mesh, one.meshes, one.file) == ("meshes", "2 × 2", ("2 axes",), "")
    assert show_finding(LOUD).loudness == "loud"
    assert show_finding(finding(title="aten.cumprod.default on (2,): S(0), then sum")).trial == "pairs"
    for verdict in (Verdict.MISSING, Verdict.SUSPECT):
        assert show_finding(finding(verdict=verdict)).loudness == ""


@pytest.mark.parametrize(
    "what", ["rank 0, 2 raises E: x", "every rank raises E: x", "hangs: x", "the process of rank 1 dies"]
)
def test_what_a_user_is_told_of_is_loud(what):
    assert show_finding(finding(reason=what)).loudness == "loud"


def test_without_kinds_the_call_and_the_mesh_say_them():
    one = show_finding(finding(sample=("c64[2]",), mesh=(2, 2)))
    assert (one.dtypes, one.meshes) == (("complex",), ("2 axes",))


def test_an_anchor_stays_and_is_its_own():
    assert anchor(SILENT.name) == "aten.cumprod.default-S-0-S-0-" + anchor(SILENT.name)[-8:]
    names = ["a: S(0) -> S(0)", "a: S 0 -> S(0)", "a: S(0), S(0)", "", HOSTILE]
    assert len({anchor(name) for name in names}) == len(names)
    for name in names:
        assert not set(anchor(name)) & set(" \"'<>&#%\n")


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (("i64[2]", "bool[2]"), "integer"),
        (("u8[3]",), "integer"),
        (("bf16[2]",), "real"),
        (("[c64[1]]", "f64[]"), "complex"),
    ],
)
def test_the_class_of_a_call(sample, told):
    assert class_of(sample) == told
