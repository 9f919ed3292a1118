"""What a sweep of torch 2.13 found wrong, played before and under our rules: wrong without them, right with them.
Our rules in DTensor's own tables: what they answer there, in a process of their own, as they stay there for good."""

import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops.utils import generate_redistribute_costs

from strategies.model.oracle import run_oracle
from strategies.ops.all_rules import OUR_RULES
from strategies.propagation.overlay.context import for_dtensor_tables, op_strategy, overlay_dtensor, schema_info
from strategies.torch_api.dtensor import PropagatorQuery
from tests.strategies.cases import numbers, sample
from tests.strategies.findings_played import FILE, Found, findings, play, wrong
from tests.strategies.small_book import RIGHT
from tests.tools import warm

ON_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the findings are those of torch 2.13")

REDISTRIBUTES = (
    "DTensor's own redistribution is wrong, in full_tensor or redistribute, which no rule of an op speaks of"
)
PARTS = "the parts themselves do not add up to the value: one is not a number, or they are rounded coarsely"
REFUSED = "the op itself refuses tensors of these shapes, but for plain ones in eager mode"
LEFT = {
    "aten.alias.default on (2,): P(product), then S(0)": REDISTRIBUTES,
    "aten.alias.default on (2,): P(product), then S(1)": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(0), a flattened submesh present": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(1), a flattened submesh present": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(2), a flattened submesh present": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(3), a flattened submesh present": REDISTRIBUTES,
    "aten.bernoulli.out on (2,): P(sum), S(0)": PARTS,
    "aten.exp.default: P(max) -> P(max)": PARTS,
    "aten.exp.default: P(min) -> P(min)": PARTS,
    "aten.mean.default: P(avg) -> P(avg)": PARTS,
    "prims.fmin.default: P(min), P(min) -> P(min)": REFUSED,
    "prims.fmin.default: P(min), R -> P(min)": REFUSED,
}
"""The findings that are wrong under our rules too, and why.  `python -m tests.strategies.findings_played` lists them."""


def first_of_each_op() -> list[Found]:
    """For each op the finding of the fewest ranks and elements."""
    smallest: dict[str, Found] = {}
    for one in sorted(findings(), key=lambda f: (f.program.ranks, f.program.sample.size)):
        smallest.setdefault(one.op, one)
    return list(smallest.values())


def assert_wrong_before(found: list[Found]) -> None:
    validated = play(found)
    assert [one.rule for one in found if not wrong(validated[one.rule])] == []


@pytest.mark.slow
@ON_2_13
def test_the_smallest_finding_of_every_third_op_is_wrong_without_our_rules():
    small = [one for one in first_of_each_op() if one.program.mesh == (2,)]
    assert len(small) > 100
    assert_wrong_before(small[::3])  # all of them: the slow test


@ON_2_13
@pytest.mark.slow
def test_every_finding_is_wrong_without_our_rules():
    assert_wrong_before([one for one in findings() if LEFT.get(one.rule) != PARTS])


@ON_2_13
@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_findings_are_right_under_our_rules_but_for_those_that_are_listed(nth):
    tried = [one for n, one in enumerate(findings()) if n % nth == 0 or one.rule in LEFT]
    with overlay_dtensor():
        validated = play(tried)
    left = {rule: wrong(verdict) for rule, verdict in validated.items() if wrong(verdict)}
    assert sorted(set(left) - set(LEFT)) == [], left
    assert sorted(set(LEFT) - set(left)) == [], "they are right now: take them out of the list"


@pytest.mark.slow
def test_in_lockstep_they_are_right_too():
    found = [one for one in first_of_each_op() if one.rule not in LEFT][::2]
    with overlay_dtensor():
        validated = play(found, lockstep=True)
    assert {rule: wrong(verdict) for rule, verdict in validated.items() if wrong(verdict)} == {}


def test_how_many_are_fixed():
    assert len(findings()) == 510
    assert set(LEFT) <= {one.rule for one in findings()}
    assert 510 - len(LEFT) >= 491


@ON_2_13
def test_the_findings_are_of_ops_that_have_a_rule_of_ours():
    assert sorted({one.op for one in findings() if one.op not in OUR_RULES}) == []


def test_the_file_is_small_enough_to_be_kept():
    assert FILE.stat().st_size < 300_000
    assert len({one.rule for one in findings()}) == 510


def wrapped(op, *args, placements, ranks=2):
    one = sample(op, *args)
    question = PropagatorQuery(one, ranks, run_oracle(one).raw)
    return question.prop._wrap_with_op_strategy(question.schema(placements))


def test_every_part_of_torch_that_is_used_is_there():
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in (
        "op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy", "op_to_rules",
        "op_to_shape_and_stride_idx", "register_op_strategy",
    ):  # fmt: skip
        assert hasattr(propagator, name)
    assert callable(generate_redistribute_costs)


def test_a_strategy_has_each_line_that_fits_and_what_it_costs():
    entry = RIGHT.get("aten.add.Tensor")
    found = op_strategy(entry, wrapped("add.Tensor", numbers(4, 3), numbers(4, 3), placements=[Shard(0), Replicate()]))
    lines = [([s.placements[0] for s in one.input_specs], one.output_spec.placements[0]) for one in found.strategies]
    assert lines == [
        ([Replicate()] * 2, Replicate()), ([Shard(0)] * 2, Shard(0)), ([Shard(1)] * 2, Shard(1)),
        ([Partial()] * 2, Partial()),
    ]  # fmt: skip
    costs = [sum(map(sum, one.redistribute_cost)) for one in found.strategies]
    assert costs[1] == 0 < costs[0]


def test_what_does_not_fit_the_mesh_is_left_out():
    entry = RIGHT.get("aten.add.Tensor")
    schema = wrapped("add.Tensor", numbers(4).bool(), numbers(4).bool(), placements=[Shard(0), Shard(0)])
    assert [str(one.output_spec.placements[0]) for one in op_strategy(entry, schema).strategies] == [
        "R",
        "S(0)",
        "P(sum)",
    ]


@pytest.mark.parametrize(("op", "words"), [("aten.add.Tensor", ["alpha"]), ("aten.exp.default", None)])
def test_dtensors_memory_is_to_tell_all_arguments_apart(op, words):
    info = schema_info(op)
    assert (info.static_argnum, info.static_kwargkey, info.needs_pytree) == (0, words, False)
    assert schema_info("aten.cat.default").needs_pytree


IN_A_PROCESS = """
import threading, torch, strategies.propagation.overlay.autoload as overlaid
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import *
import localtensor as lt
from strategies.torch_api import user_modules as modules, dtensor as torch_dtensor; from strategies.validation.sources import dtensor as sources
from strategies.model.rule import call_of, Sample, overload

found = modules.load_rules("strategies.propagation.overlay.autoload", ".")
assert set(found.ops) == {str(op) for op in overlaid.OVERLAY.handlers} and not found.ignored, found
shift = overload("aten.__lshift__.Scalar")
assert torch_dtensor.special_dispatch_reason(shift) == "" and torch_dtensor.registry_of(shift) == "op strategy"
x = torch.arange(5.)
call, tensors = call_of(overload("aten.cumsum.default"), (x, 0), {})
claims = sources.claims(Sample(call, tuple(tensors), ""), 2, x.cumsum(0))
assert "aten.cumsum.default: R -> R" in map(lambda c: str(c.rule), claims), claims
assert not any("S(0) -> S(0)" in str(c.rule) for c in claims), claims

def program():
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.arange(5), mesh, [Shard(0)]).__lshift__(1).full_tensor()

seen = []
thread = threading.Thread(target=lambda: seen.append(lt.run(program, ranks=2).values))
thread.start(); thread.join()
assert torch.equal(seen[0][1], torch.arange(5) << 1), seen
print("all is well")
"""


def test_importing_overlaid_puts_the_whole_book_into_the_process():
    ran = warm.run([sys.executable, "-c", IN_A_PROCESS])
    assert ran.stdout == "all is well\n", ran.stderr


def test_what_dtensor_cannot_call_on_pieces_has_no_lines_in_its_tables():
    left_in = {op: for_dtensor_tables(OUR_RULES.get(op)) is OUR_RULES.get(op) for op in (
        "aten.squeeze.dim", "aten.native_group_norm.default", "aten.squeeze_copy.dim", "aten.neg.default",
        "aten.native_group_norm_backward.default",
    )}  # fmt: skip
    rewritten = [hasattr(DTensor._op_dispatcher.sharding_propagator, feature) for feature in (
        "squeeze_op_to_dims_variant", "op_to_scalar_shape_adjuster",
    )]  # fmt: skip
    assert list(left_in.values()) == [*rewritten, False, True, False]
    served = for_dtensor_tables(OUR_RULES.get("aten.squeeze_copy.dim"))
    schema = wrapped("squeeze_copy.dim", numbers(2, 3), 0, placements=[Shard(0)])
    assert [str(one.output_spec.placements[0]) for one in op_strategy(served, schema).strategies] == ["R"]
