"""Ops that DTensor's dispatcher treats by itself, with placements that no rule takes: a handler has to redistribute."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from strategies.model.oracle import run_oracle
from strategies.model.rule import WRITTEN_UNDECLARED, _written_unreturned
from strategies.model.verdict import ALONE, PAIRS
from strategies.programs import mesh_validation
from strategies.programs.chained import validate_with_follow_ups
from strategies.programs.mesh_validation import oracle_and_claims, try_redistributed, validate_handlers
from strategies.validation.finding import OverloadTask
from tests.strategies.cases import numbers
from tests.strategies.planted_ops import plant, planted

DISPATCHER = DTensor._op_dispatcher
plant("ranked(Tensor x) -> Tensor", lambda x: x.cumsum(1), "S")
RANKED = planted("ranked", numbers(4, 6))
plant("moving(Tensor x) -> Tensor", lambda x: x.cumsum(1))
MOVING = planted("moving", numbers(4, 6))


plant("joined(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y, meta=lambda x, y: torch.empty_like(x))


@register_sharding(torch.ops.planted.joined.default)
def _together(x, y):
    return [([p], [p, p]) for p in (Replicate(), Partial())]


@register_sharding(torch.ops.planted.moving.default)
def _rows(x):
    return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]


def _tally(x, total):
    total += x.sum(0)
    return x * 2


plant("tally(Tensor x, Tensor total) -> Tensor", _tally, meta=lambda x, total: torch.empty_like(x))
TALLY = planted("tally", numbers(4, 6), numbers(6, seed=1))


@register_sharding(torch.ops.planted.tally.default)
def _columns(x, total):
    return [([Replicate()], [Replicate(), Replicate()]), ([Shard(1)], [Shard(1), Shard(0)])]


def handled(redistribute):
    """A handler that runs the op on the pieces as they come, or as the rule asks for them."""

    def handler(op, args, kwargs):
        info = DISPATCHER.unwrap_to_op_info(op, args, kwargs)
        DISPATCHER.sharding_propagator.propagate(info)
        sharding = info.output_sharding
        if redistribute and sharding.needs_redistribute:
            DISPATCHER.redistribute_local_args(
                info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
            )
        return DISPATCHER.wrap(op(*info.local_args), sharding.output_spec)

    return handler


def task(sample, kind=ALONE):
    return OverloadTask(sample.op, (sample,), ((2,),), 0, kind)


def wrong(results):
    return sorted(str(name) for result in results for name in result.suspects)


@pytest.fixture
def planted_handler(monkeypatch):
    def plant_it(op, redistribute):
        monkeypatch.setitem(DISPATCHER._custom_op_handlers, op, handled(redistribute))

    return plant_it


@pytest.mark.parametrize("redistribute", [False, True])
def test_a_handler_that_does_not_redistribute_is_found_and_one_that_does_is_right(planted_handler, redistribute):
    planted_handler(torch.ops.planted.moving.default, redistribute)
    results = []
    validate_handlers(task(MOVING), results, lambda step: None)
    assert wrong(results)[-1:] == ([] if redistribute else ["planted.moving.default on (2,): S(1)"])
    assert sum(result.tried for result in results) >= 1


@pytest.mark.parametrize(("kind", "found"), [(RuntimeError, 1), (NotImplementedError, 0)])
def test_a_handler_that_every_rank_refuses_is_a_finding_unless_it_says_that_there_is_no_rule(monkeypatch, kind, found):
    def refusing(op, args, kwargs):
        if args[0].placements == (Shard(1),):
            raise kind(f"{op} of columns")
        return handled(redistribute=True)(op, args, kwargs)

    monkeypatch.setitem(DISPATCHER._custom_op_handlers, torch.ops.planted.moving.default, refusing)
    results = []
    validate_handlers(task(MOVING), results, lambda step: None)
    names = [name for result in results for name in result.suspects]
    assert len(names) == found and all("every rank raises RuntimeError" in name for name in names)


def test_calls_of_an_op_with_a_handler_are_tried_up_to_a_number_of_tensors(planted_handler, monkeypatch):
    monkeypatch.setattr(mesh_validation, "HANDLED_TENSORS", 2)
    planted_handler(torch.ops.planted.moving.default, True)
    calls = tuple(planted("moving", numbers(4, 6, seed=seed)) for seed in range(3))
    one, two, three = ([], [], [])
    for results, many in ((one, 1), (two, 2), (three, 3)):
        asked = OverloadTask(MOVING.op, calls[:many], ((2,),), 0, ALONE)
        validate_handlers(asked, results, lambda step: None)
    counts = [sum(result.tried for result in results) for results in (one, two, three)]
    assert counts[0] < counts[1] == counts[2]


def test_an_op_without_a_handler_is_tried_with_what_follows_it():
    results = []
    validate_handlers(task(MOVING), results, lambda step: None)
    assert results == []
    pairs = validate_with_follow_ups(task(MOVING, PAIRS), lambda step: None)
    assert sum(result.tried for result in pairs) >= 4 and not [n for n in wrong(pairs) if "then" not in n]


def test_a_dispatcher_that_does_not_redistribute_is_found_for_an_op_without_a_handler(monkeypatch):
    def as_they_are(info, *args):
        info.local_args = tuple(x for x in info.local_args)

    monkeypatch.setattr(type(DISPATCHER), "redistribute_local_args", staticmethod(as_they_are))
    pairs = validate_with_follow_ups(task(MOVING, PAIRS), lambda step: None)
    assert "planted.moving.default on (2,): S(1)" in wrong(pairs)


def test_a_handler_is_not_tried_twice(planted_handler):
    planted_handler(torch.ops.planted.moving.default, redistribute=False)
    assert not [n for n in wrong(validate_with_follow_ups(task(MOVING, PAIRS), lambda step: None)) if "then" not in n]


def test_only_placements_that_no_rule_takes_are_tried_and_nothing_where_a_rule_is_wrong():
    oracle, claimed = oracle_and_claims(MOVING, (2,), 0)
    tried = try_redistributed(MOVING, oracle, (2,), claimed, seed=0)
    assert tried and all(program.inputs[0][0] not in (Replicate(), Shard(0)) for program, _ in tried)
    assert not any(found.wrong for _, found in tried)
    oracle, claimed = oracle_and_claims(RANKED, (2,), 0)
    assert [str(claim.rule) for claim in claimed[2]] and not try_redistributed(RANKED, oracle, (2,), claimed, seed=0)
    assert run_oracle(RANKED).outputs[0].shape == (4, 6)


@pytest.mark.parametrize("divided", [True, False])
def test_whole_integers_that_are_made_parts_of_a_sum_keep_their_dtype(monkeypatch, divided):
    """torch 2.13 divides them by the number of ranks, which makes floats of them."""

    def parts(self, x, mesh, axis):
        return x / mesh.size(axis) if divided else x * (mesh.get_local_rank(axis) == 0)

    monkeypatch.setattr(Partial, "_partition_value", parts)
    whole = torch.arange(24).view(4, 6)
    found = validate_with_follow_ups(task(planted("joined", whole, whole + 3), PAIRS), lambda step: None)
    joined = {"planted.joined.default on (2,): P(sum), R", "planted.joined.default on (2,): R, P(sum)"}
    assert set(wrong(found)) == (joined if divided else set())


def test_a_write_to_an_argument_that_was_redistributed_is_lost(monkeypatch):
    monkeypatch.setitem(WRITTEN_UNDECLARED, "planted.tally", ("total",))
    _written_unreturned.cache_clear()
    try:
        oracle, claimed = oracle_and_claims(TALLY, (2,), 0)
        found = {str(p.inputs): seen.wrong for p, seen in try_redistributed(TALLY, oracle, (2,), claimed, seed=0)}
        columns = found[str(((Shard(1),), (Replicate(),)))]
        assert columns.startswith("rank 0: output 1 gathered from R differs")
        assert torch.equal(TALLY.tensors[1], numbers(6, seed=1))
    finally:
        _written_unreturned.cache_clear()
