from strategies.model.verdict import Verdict
from strategies.sweep import aggregate
from strategies.sweep.report import html_pictures
from tests.strategies.gate_cases import finding
from tests.strategies.journals import OPS, begin, lines


def drawn(told=None, ops=OPS):
    told = lines() if told is None else told
    return {family.head.name: family for family in html_pictures.families(ops, told, aggregate.report(begin(), told))}


def cells(row):
    names = [f"takes {c}" for c in html_pictures.TAKES] + [f"gives {c}" for c in html_pictures.GIVES]
    return {name: (cell.worst.value, cell.count) for name, cell in zip(names, row.cells) if cell}


def test_every_overload_of_the_plan_is_there_once():
    rows = [row.name for family in drawn().values() for row in family.rows]
    assert sorted(rows) == OPS


def test_families_with_findings_come_first_and_then_names():
    assert list(drawn()) == ["cumprod", "add", "gather", "neg"]


def test_a_rule_counts_under_what_it_takes_and_what_it_gives():
    family = drawn()["cumprod"]
    assert cells(family.rows[0]) == {
        "takes S(0)": ("unsound", 1), "takes S(1)": ("suspect", 1), "takes S(3+)": ("sound", 1),
        "takes P(max)": ("untestable", 1), "gives S": ("unsound", 1), "gives P": ("untestable", 1),
    }  # fmt: skip
    assert family.rows[0].counts == {
        Verdict.UNSOUND: 1, Verdict.SUSPECT: 1, Verdict.SOUND: 1, Verdict.UNTESTABLE: 1,
    }  # fmt: skip


def test_the_worst_verdict_wins_and_the_rest_is_reported():
    (cell,) = [c for c in drawn()["cumprod"].rows[0].cells[-len(html_pictures.GIVES) :] if c and c.column == "S"]
    assert cell.words == "1 unsound, 1 suspect, 1 sound"


def test_a_family_sums_its_overloads_up():
    family = drawn()["add"]
    assert [row.name for row in family.rows] == ["aten.add.Tensor", "aten.add_.Tensor"]
    assert cells(family.head) == {
        "takes R": ("sound", 1), "takes S(0)": ("sound", 1), "takes P(sum)": ("unsound", 1),
        "gives R": ("sound", 1), "gives S": ("sound", 1), "gives P": ("unsound", 1),
    }  # fmt: skip
    assert (family.head.bad, family.head.rules) == (1, 4)


def test_a_rule_that_a_real_run_cleared_is_sound():
    assert cells(drawn()["gather"].rows[0])["takes S(0)"] == ("sound", 1)


def test_a_rule_that_is_found_wrong_is_not_sound_as_well():
    told = [
        *lines(),
        {**lines()[3], "unit": "aten.cumprod.default alone bool 2", "sound": ["aten.cumprod.default: S(0) -> S(0)"]},
    ]
    assert cells(drawn(told)["cumprod"].rows[0])["takes S(0)"] == ("unsound", 1)


def test_an_overload_without_a_rule_says_why():
    (row,) = drawn()["neg"].rows
    assert (row.why, row.verdicts, row.crashed, any(row.cells)) == ("no sample fits", "crashed", 1, False)
    (other,) = drawn([], ["aten.exp.default"])["exp"].rows
    assert (other.why, other.verdicts) == ("no rule was tried", "none")


def test_a_finding_of_an_op_that_was_not_asked_for_has_a_row():
    assert [row.name for row in drawn(ops=[])["cumprod"].rows] == ["aten.cumprod.default"]


def test_nothing_is_no_map():
    assert html_pictures.families([], [], aggregate.report(begin(), [])) == ()


def test_strided_and_foreign_placements_are_other():
    assert html_pictures.input_columns(["SS(0,2)", "R"]) == ("other",)
    assert html_pictures.output_columns(["P(max)", "S(4)", "MaskPartial(x)"]) == ("P", "S", "other")
    assert html_pictures.columns_of(finding(placements="SS(0,2)").rule) == ("other",)


def test_families_are_named_for_what_their_overloads_have_in_common():
    names = [
        "aten._fft_c2c.out",
        "aten.gelu_backward.grad_input",
        "aten.__lshift__.Scalar",
        "aten._.x",
        "mine.add_.default",
    ]
    assert [html_pictures.family_of(name) for name in names] == ["fft_c2c", "gelu", "lshift", "_", "mine.add"]
