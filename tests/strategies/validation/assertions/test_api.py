"""assert_rule: right rules pass, wrong ones are found and shown so that they can be run again; what is no rule is told."""

import functools
import runpy
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement
from localtensor.testing import draws
from localtensor.testing.hypothesis_strategies.values import Drawn
from strategies.validation.assertions.api import assert_rule, check_case, rule_cases
from strategies.validation.assertions.case import RuleCase
from strategies.validation.assertions.rule import NotARule, NothingTested, WrongRule
from tests.localtensor import rules_tried
from tests.localtensor.rules_tried import RIGHT, SOME_CALLS, WRONG
from tests.tools import warm

WORDS = {"torch": torch, "Drawn": Drawn, "RuleCase": RuleCase, "assert_rule": assert_rule,
         "inf": float("inf"), "nan": float("nan")}  # fmt: skip


def wrong_of(op, rule, **options):
    with pytest.raises(WrongRule) as told:
        assert_rule(op, rule, **options)
    return told.value


found_once = functools.cache(wrong_of)


def thirds(rules):
    """Parameters of which every third is tried by default; a rule of each kind is among them."""
    return [pytest.param(*given, marks=[] if n % 3 == 0 else pytest.mark.slow) for n, given in enumerate(rules)]


# -- right and wrong


@pytest.mark.few(8)
@pytest.mark.parametrize(("op", "rule"), RIGHT)
def test_a_right_rule_passes(op, rule):
    assert assert_rule(op, rule, max_examples=8) is None


@pytest.mark.few(3)
@pytest.mark.parametrize(("op", "rule", "where"), SOME_CALLS, ids=[f"{op} {rule}" for op, rule, _ in SOME_CALLS])
def test_a_rule_that_is_right_of_some_calls_passes_on_those_alone(op, rule, where):
    assert assert_rule(op, rule, where=where, max_examples=15) is None
    assert wrong_of(op, rule).case.ranks == 2


@pytest.mark.few(20)
@pytest.mark.parametrize(("op", "rule"), thirds(WRONG))
def test_a_wrong_rule_is_found_and_each_way_to_repeat_it_does(op, rule):
    wrong = found_once(op, rule)
    assert wrong.case.ranks <= 3
    assert max((size for x in wrong.case.args if isinstance(x, Drawn) for size in x.shape), default=1) <= 2
    with pytest.raises(WrongRule):
        eval(wrong.repeat, dict(WORDS))
    with pytest.raises(WrongRule):
        check_case(eval(wrong.example.removeprefix("@example(case=")[:-1], dict(WORDS)))


def test_a_result_of_floats_of_one_byte_is_compared_exactly():
    calls = [((torch.linspace(-2, 2, 5),), {"dtype": torch.float8_e4m3fn})]
    assert assert_rule("aten._to_copy.default", "S(0) -> S(0)", calls=calls) is None
    wrong = wrong_of("aten._to_copy.default", "P(sum) -> R", calls=calls)
    assert "torch.float8_e4m3fn" in wrong.repeat


def test_there_are_as_many_rules_as_are_promised():
    assert len(RIGHT) + len(SOME_CALLS) >= 40
    assert len(WRONG) >= 30


# -- the counterexample


def script_says(wrong, tmp_path, capsys):
    file = tmp_path / "wrong_rule.py"
    file.write_text(wrong.script)
    before = list(sys.path)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(file))
    finally:
        sys.path[:] = before
    return ended.value.code, capsys.readouterr().out


@pytest.mark.parametrize(("op", "rule"), thirds([*WRONG[:9], *WRONG[15:27], *WRONG[36:48]]))
def test_the_script_shows_the_wrong_number_without_us(op, rule, tmp_path, capsys):
    wrong = found_once(op, rule)
    code, said = script_says(wrong, tmp_path, capsys)
    assert code == 1
    assert "WRONG" in said
    assert "localtensor" not in wrong.script.replace("tests.localtensor.rules_tried", "").replace(
        str(rules_tried.__file__), ""
    )


def test_the_script_runs_in_a_process_of_its_own(tmp_path):
    file = tmp_path / "wrong_rule.py"
    file.write_text(wrong_of("ruletests::scale", "P(max) -> P(max)").script)
    ran = warm.run([sys.executable, str(file)], cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "result 0, all ranks together, WRONG" in ran.stdout


@pytest.mark.parametrize(
    ("rule", "printed"), [("S(0) -> R", "rank 1, WRONG"), ("S(0) -> P(sum)", "shape (2,), the total (3,)")]
)
def test_the_script_compares_the_shapes_of_uneven_pieces_before_their_values(rule, printed, tmp_path, capsys):
    wrong = wrong_of("aten.neg.default", rule, calls=[((torch.arange(3.0),), {})], ranks=(2,))
    code, output = script_says(wrong, tmp_path, capsys)
    assert code == 1
    assert printed in output


def test_the_script_of_a_rule_that_is_right_says_so(tmp_path, capsys):
    wrong = wrong_of("aten.neg.default", "S(0) -> R")
    fixed = wrong.script.replace(
        "gots[rank][0], wants[0], ",
        "gots[rank][0], wants[0].chunk(2)[rank] if rank < len(wants[0].chunk(2)) else wants[0][:0], ",
    )
    wrong.script = fixed
    code, said = script_says(wrong, tmp_path, capsys)
    assert code == 0
    assert "WRONG" not in said


def test_the_message_has_five_parts_then_the_case_and_its_ranks():
    said = str(wrong_of("aten.cumsum.default", "S(0) -> S(0)", dtypes=[torch.int64])).splitlines()
    assert said[0] == (
        "assert_rule: rule: aten.cumsum.default: S(0) -> S(0): on 2 ranks, result 0 as S(0): the ranks together have 1"
        " at [1], the op gives 2; 1 of 2 elements differ."
        " Correct the rule or the op, or ask it of fewer calls (where=, calls=, uneven=False)."
    )
    assert said[2].startswith("  the call  aten.cumsum.default(i64[2] S(0), 0) on 2 ranks, the smallest of ")
    assert said[3:7] == [
        "  tensor 0  [1, 1] of shape (2,)",
        "    S(0): rank 0 [1] of shape (1,); rank 1 [1] of shape (1,)",
        "  got   [1, 1] of shape (2,) (the ranks together)",
        "  want  [1, 2] of shape (2,)",
    ]


def test_a_rank_that_raises_is_named():
    halved = wrong_of("aten.mm.default", "S(1), R -> P(sum)")
    assert "rank 0 raises RuntimeError" in str(halved) or "rank 1 raises RuntimeError" in str(halved)


def test_a_rank_of_another_shape_is_named():
    assert "rank 0 has shape (1,), the placement asks for (2,)" in str(
        wrong_of("aten.neg.default", "S(0) -> R", ranks=(2,), calls=[((torch.ones(2),), {})])
    )


def test_an_argument_that_is_written_to_is_compared():
    wrong = wrong_of(rules_tried.bump, "P(sum), R -> -")
    assert wrong.case.op == "ruletests.bump.default"
    assert "result 0 as P(sum)" in str(wrong)


KEPT = RuleCase("aten.cumsum.default", "S(0) -> S(0)", (Drawn((2,), torch.float64, "ones", 0), 0), {}, ranks=2)


def test_an_example_line_stands_above_a_test():
    @settings(max_examples=1, database=None)
    @example(case=KEPT)
    @given(case=rule_cases("aten.cumsum.default", "R -> R"))
    def looks(case):
        check_case(case)

    with pytest.raises(WrongRule):
        looks()


def test_a_strategy_of_cases_gives_cases_that_hold():
    seen = []

    @settings(max_examples=20, database=None, derandomize=True)
    @given(case=rule_cases("ruletests::scale", "P(sum) -> P(sum)"))
    def looks(case):
        check_case(case)
        seen.append(case)

    looks()
    assert {case.ranks for case in seen} <= {2, 3, 4}
    assert eval(repr(seen[0]), dict(WORDS)) == seen[0]


# -- what is asked


def test_the_same_seed_tries_the_same():
    messages = {str(wrong_of("aten.roll.default", "S(0) -> S(0)", seed=4)) for _ in range(2)}
    assert len(messages) == 1


def test_an_op_is_an_overload_a_packet_a_name_or_what_custom_op_gave():
    for op in (
        torch.ops.ruletests.scale.default,
        torch.ops.ruletests.scale,
        "ruletests.scale.default",
        rules_tried.scale,
    ):
        assert assert_rule(op, "S(0) -> S(0)", max_examples=5) is None


def test_a_rule_is_text_or_tuples_of_placements():
    assert assert_rule("aten.mm.default", ((Shard(1), Shard(0)), (Partial(),)), max_examples=10) is None
    assert assert_rule("aten.mm.default", (("S(0)", Replicate()), "S(0)"), max_examples=10) is None


def test_calls_are_a_list_or_a_strategy():
    tensors = draws.drawn(dtype=torch.float64, min_dims=2, max_dims=2)
    assert (
        assert_rule("aten.cumsum.default", "S(0) -> S(0)", calls=st.tuples(tensors).map(lambda x: ((*x, 1), {})))
        is None
    )
    assert assert_rule("aten.cumsum.default", "S(0) -> S(0)", calls=[((torch.ones(3, 2), 1), {})]) is None
    with pytest.raises(WrongRule):
        assert_rule("aten.cumsum.default", "S(0) -> S(0)", calls=[((torch.ones(3, 2), 0), {})])


def test_uneven_shards_are_left_out_if_asked():
    seen = set()

    def where(x):
        seen.add(x.shape[0])
        return True

    assert (
        assert_rule("aten.neg.default", "S(0) -> S(0)", where=where, uneven=False, ranks=(2,), max_examples=20) is None
    )
    assert seen & {1, 3, 5}
    cases = rule_cases("aten.neg.default", "S(0) -> S(0)", uneven=False)
    assert cases is not None
    with pytest.raises(NothingTested, match="uneven shards were not asked for"):
        assert_rule("aten.neg.default", "S(0) -> S(0)", calls=[((torch.ones(3),), {})], ranks=(2,), uneven=False)


def test_its_own_copies_are_what_an_op_sees():
    x = torch.ones(4, dtype=torch.float64)
    assert assert_rule("aten.add_.Scalar", "S(0) -> S(0)", calls=[((x, 1.0), {})]) is None
    assert x.tolist() == [1.0] * 4


# -- refusals


@pytest.mark.parametrize(("op", "rule", "options", "says"), [
    ("nobody::knows", "S(0) -> S(0)", {}, "op: 'nobody::knows': no such op is registered"),
    ("what?", "S(0) -> S(0)", {}, "this is no name of an op"),
    (torch.relu, "S(0) -> S(0)", {}, "it is no registered op"),
    (torch.ops.aten.add, "S(0), S(0) -> S(0)", {}, "overloads: Tensor"),
    ("aten.neg.default", "S(0)", {}, "it has no two sides"),
    ("aten.neg.default", "S(0) => S(0)", {}, "it has no two sides"),
    ("aten.neg.default", " -> S(0)", {}, "there is at least one"),
    ("aten.neg.default", "- -> S(0)", {}, "each input is a tensor"),
    ("aten.neg.default", "S(0 -> S(0)", {}, "is no list of placements"),
    ("aten.neg.default", 3, {}, "it has no two sides"),
    ("aten.neg.default", "R -> R", {"ranks": ()}, "no counts of 2 ranks or more"),
    ("aten.neg.default", "R -> R", {"ranks": (1,)}, "no counts of 2 ranks or more"),
    ("aten.neg.default", "R -> R", {"max_examples": 0}, "no number of examples"),
    ("aten.neg.default", "R -> R", {"splits": ()}, "there is no seed in it"),
    ("aten.neg.default", "R -> R", {"calls": []}, "there is no call in it"),
    ("aten.neg.default", "R -> R", {"calls": [torch.ones(2)]}, "this is no call"),
    ("aten.neg.default", "R -> R, R", {"calls": [((torch.ones(2),), {})]}, "the rule has 2 outputs, and the call 1 results"),
    ("ruletests::scale", "R -> -", {}, "result 0 is a tensor, and the rule has '-' for it"),
    ("ruletests::halves", "R -> R, R", {"calls": [((torch.ones(2),), {})]}, "result 1 is no tensor but "),
    ("aten.neg.default", "R, R -> R", {"calls": [((torch.ones(2),), {})]}, "the rule has 2 inputs, and the call 1 tensors"),
])  # fmt: skip
def test_what_is_no_rule_is_refused(op, rule, options, says):
    with pytest.raises(NotARule) as told:
        assert_rule(op, rule, **options)
    assert says in str(told.value)
    assert len(str(told.value).split(": ")) >= 4


@pytest.mark.parametrize("rule", ["S(0) -> P(mean)", "Q -> R", "S(-1) -> R", ((Shard(-1),), (Replicate(),))])
def test_what_is_no_placement_is_refused(rule):
    with pytest.raises(BadPlacement):
        assert_rule("aten.neg.default", rule)


@pytest.mark.few(4)
@pytest.mark.parametrize(("op", "rule", "options", "says"), [
    ("aten.neg.default", "R, R -> R", {}, "its schema has no such number of tensors"),
    ("aten.neg.default", "S(7) -> S(7)", {}, "no tensor has the dims that the rule cuts"),
    ("aten.neg.default", "S(1) -> S(1)", {"calls": [((torch.ones(2),), {})]}, "S(1) of a tensor of 1 dims"),
    ("aten.t.default", "S(4) -> S(4)", {}, "no tensor has the dims that the rule cuts"),
    ("aten.neg.default", "P(avg) -> P(avg)", {"dtypes": [torch.int64]}, "an average of torch.int64 need not be one"),
    ("aten.tril.default", "R -> R", {"calls": [((torch.ones(3), ), {})]}, "the op refuses it: RuntimeError"),
    ("aten.neg.default", "R -> R", {"where": lambda x: False}, "where= asks for no such call"),
    ("aten.bernoulli.default", "R -> R", {}, "it draws random numbers"),
])  # fmt: skip
def test_nothing_tested_is_no_pass(op, rule, options, says):
    with pytest.raises(NothingTested, match="nothing was tested") as told:
        assert_rule(op, rule, **options)
    assert says in str(told.value)
