"""Chains of steps: which are drawn, what only they find, and to what a wrong one is reduced."""

import itertools
import random

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._redistribute import Redistribute
from torch.distributed.tensor.experimental import register_sharding

from localtensor.layout import StridedShard
from strategies.model.rule import overload
from strategies.programs import chained, chains
from strategies.programs.chained import follow_up_programs, validate_with_follow_ups
from strategies.programs.chains import (
    MAX_ELEMENTS,
    chain_programs,
    fault_key,
    redistribution_key,
    reshape_programs,
    wrong_chains,
    wrong_redistributions,
)
from strategies.programs.mesh_programs import every_redistribution
from strategies.programs.random_laws import wrong_program_candidate
from strategies.programs.run.follow_ups import GRADS, RESHAPES, RESULT_STEPS, shorter_chains, steps_of
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation
from strategies.torch_api import dtensor
from strategies.validation.finding import OverloadTask
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, sample, silent
from tests.strategies.programs_of import assert_goes_wrong, assert_right, on
from tests.strategies.users import undone

X = numbers(4, 6)
SIN = sample("sin.default", X)
S0, S1 = Shard(0), Shard(1)
WRONG = Confirmation("rank 0: it differs")


def drawn(one, count=16, mesh=(2,), inputs=((S0,), (S1,)), seed=0):
    return chain_programs(one, inputs, mesh, seed=seed, most=count)


def test_a_chain_has_two_or_three_steps_that_plain_torch_takes_and_perhaps_a_gradient_at_its_end():
    chains_of = [steps_of(p.then) for p in drawn(SIN)]
    assert {len(steps) for steps in chains_of} == {2, 3}
    assert all(step in RESULT_STEPS for steps in chains_of for step in steps[:-1])
    ends = {steps[-1] for steps in chains_of}
    assert ends & GRADS.keys() and ends & RESULT_STEPS.keys()
    for program in drawn(SIN):
        assert oracle_of_program(program).outputs


def test_redistributions_stand_between_ops():
    between = {step for p in drawn(SIN, 30) for step in steps_of(p.then)[:-1]}
    assert {"R", "S(0)", "S(1)"} <= between


def test_chains_are_the_same_for_a_seed_and_others_for_another():
    assert drawn(SIN) == drawn(SIN) != drawn(SIN, seed=1)
    assert {p.inputs for p in drawn(SIN)} == {((S0,),), ((S1,),)}
    assert {p.inputs[0][0] for p in drawn(SIN, 3, mesh=(2, 3))} == {chains.Replicate()}


def test_integers_have_no_gradient_and_a_scalar_is_not_sharded():
    whole = drawn(sample("neg.default", numbers(4, 6, dtype=torch.int64)))
    assert whole and not any(steps_of(p.then)[-1] in GRADS for p in whole)
    scalars = [p.then for p in drawn(sample("sum.default", X), 16)]
    assert scalars and not any(then.startswith("S(") for then in scalars)


def test_an_op_that_plain_torch_refuses_and_one_without_claims_have_no_chain():
    assert drawn(sample("mm.default", X, X), inputs=((S0, S0),)) == drawn(SIN, inputs=()) == []


def test_results_stay_small():
    big = sample("neg.default", numbers(MAX_ELEMENTS // 4))
    after = [oracle_of_program(p).outputs for p in drawn(big, inputs=((S0,),)) if steps_of(p.then)[-1] not in GRADS]
    assert after and all(x.numel() <= MAX_ELEMENTS for outs in after for x in outs)


@pytest.mark.parametrize("then", [
    "exp | S(0) | grad", "times 2 | sum -1", "S(1) | transpose | sgd", "squared | R | adam", "only 0 | exp | sum",
    "cast float32 | exp | cast float64", "root | local | grad S(0)", "squared | S(0) | grad twice",
])  # fmt: skip
def test_right_chains_are_right(then):
    assert_right(on(SIN, "S(0)", then=then), on(SIN, "R", then=then), on(SIN, "S(1)", (3,), then=then))


# What only a chain shows.


def doubled_gradients(monkeypatch):
    """The gradient of each redistribution is twice what it should be."""
    backward = Redistribute.backward

    def twice(ctx, grad):
        first, *rest = backward(ctx, grad)
        return (first * 2, *rest)

    monkeypatch.setattr(Redistribute, "backward", staticmethod(twice))


@pytest.mark.slow
def test_a_wrong_backward_of_a_redistribution_is_found_by_chains_alone(monkeypatch):
    doubled_gradients(monkeypatch)
    every = claims(SIN, 2, torch.sin(X))
    single = follow_up_programs(SIN, every, (2,))
    assert single and not any(found.wrong for found in run_simulated_programs(single))
    found = wrong_chains(drawn(SIN))
    assert found and {p.sample.op for p, _ in found} == {chains.ALIAS}
    assert {p.then for p, _ in found} >= {"R | grad", "S(0) | grad", "S(1) | grad"}


@pytest.mark.slow
def test_the_sweep_draws_chains_and_finds_it(monkeypatch):
    doubled_gradients(monkeypatch)
    samples = tuple(sample("sin.default", numbers(4 + n, 6)) for n in range(chained.CHAINED_SAMPLES))

    def found(seed):
        task = OverloadTask("aten.sin.default", samples, ((2,),), seed, "pairs")
        return [name for result in validate_with_follow_ups(task, silent) for name in result.suspects]

    assert any(name.endswith("| grad") for seed in (0, 6) for name in found(seed))  # seeds that draw a redistribution
    monkeypatch.setattr(chained, "CHAINED_SAMPLES", 0)
    assert not any(name.endswith("| grad") for seed in (0, 6) for name in found(seed))


# Two reshapes.


def test_a_reshape_that_is_wrong_for_what_another_leaves_is_found(monkeypatch):
    """Planted: what has one dim, and is no longer in the order of its ranks, is taken apart as if it were."""
    own = DTensor.unflatten
    monkeypatch.setattr(
        DTensor, "unflatten", lambda x, *sizes: own(x, *sizes) * (2 if x.ndim == 1 else 1), raising=False
    )
    programs = [p for p in reshape_programs((2,), seed=0) if p.then.startswith(("view |", "flatten |"))]
    found = [program for program, _ in wrong_chains(programs)]
    assert {p.then for p in found} >= {"view | unflatten", "view | unflatten 0"}
    single = [p for p in follow_up_programs(sample("clone.default", numbers(4, 6)), [], (2,)) if p.then]
    assert not any(seen.wrong for seen in run_simulated_programs(single))


@pytest.mark.parametrize("mesh", [(2,), (2, 2), (2, 2, 2)])
def test_each_axis_shards_a_dim_of_what_is_reshaped_twice_and_two_axes_may_shard_one(mesh):
    programs = reshape_programs(mesh, seed=0)
    apart = {tuple(map(Shard, dims)) for dims in itertools.permutations(range(3), len(mesh))}
    together = {(Shard(dim), Shard(dim)) for dim in range(3)} if len(mesh) == 2 else set()
    assert {p.inputs[0] for p in programs} == apart | together
    assert {(len(steps_of(p.then)), *steps_of(p.then)[:1]) for p in programs} == {(2, step) for step in RESHAPES}
    assert reshape_programs((2, 2, 2, 2), seed=0) == []


def test_faults_of_two_reshapes_are_one_by_the_second_and_redistributions_by_their_layouts():
    programs = reshape_programs((2,), seed=0)
    keys = {fault_key(wrong_program_candidate(p, WRONG)) for p in programs}
    assert keys == {f"{step} of what was reshaped, mesh axes: 1" for step in RESHAPES}
    moves = every_redistribution((2, 2), seed=0) + every_redistribution((2, 3), seed=0)
    keys = {fault_key(wrong_program_candidate(p, WRONG)) for p in moves}
    assert "SS(0), S(1) to (S(1), S(0)), a flattened submesh: False" in keys and len(keys) < len(moves) / 2


def test_of_redistributions_that_are_wrong_one_is_left_for_each_two_layouts(monkeypatch):
    """Planted: what comes from a strided shard is twice as large."""
    own = DTensor.redistribute

    def redistribute(x, **options):
        return own(x, **options) * (2 if isinstance(x.placements[0], StridedShard) else 1)

    monkeypatch.setattr(DTensor, "redistribute", redistribute)
    programs = [p for p in every_redistribution((2, 2), seed=0) if p.then.endswith("(R, R)")]
    wrong = [p for p, seen in zip(programs, run_simulated_programs(programs), strict=True) if seen.wrong]
    found = wrong_redistributions(programs)
    assert 0 < len(found) < len(wrong) and all(seen.wrong for _, seen in found)
    assert len({redistribution_key(p) for p, _ in found}) == len(found)


# Six calls of an overload.


def wrong_for_nine_columns():
    """`x * y` keeps maxima where x has nine columns: wrong for y < 0."""
    op = overload("aten.mul.Tensor")
    for table in ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy"):
        getattr(dtensor.propagator(), table).pop(op, None)
    odd = [([Partial("max")], [Partial("max"), None])]
    register_sharding(op)(lambda x, y: odd if x.shape[-1] == 9 else [([S0], [S0, None])])


@pytest.mark.slow  # as test_the_sweep_draws_chains_and_finds_it
def test_a_rule_that_is_wrong_for_a_further_call_alone_is_found():
    # Integers: of a further sample of floats a gradient comes first.
    samples = tuple(sample("amax.default", (numbers(4, n) * 8).long(), [0]) for n in (4, 5, 6, 9))

    def keeps_maxima(samples, seed):
        found = validate_with_follow_ups(OverloadTask(samples[0].op, samples, ((2,),), seed, "pairs"), silent)
        return any(
            name.startswith("aten.alias.default on (2,): P(max), then times") for r in found for name in r.suspects
        )

    with undone():
        wrong_for_nine_columns()
        assert keeps_maxima(samples, seed=0) and not keeps_maxima(samples[:3], seed=0)


# What is left of a wrong chain.


def test_a_chain_is_reduced_to_its_wrong_step_on_a_fresh_tensor():
    with undone():
        wrong_for_nine_columns()
        one = sample("amax.default", numbers(4, 9), [0])
        assert wrong_chains([on(one, "S(0)", then="R | times -1 | sum")]) == []  # after R there is no maximum left
        ((program, seen),) = wrong_chains([on(one, "S(0)", then="times -1 | sum | unsqueeze")])
        assert str(program) == "aten.alias.default on (2,): P(max), then times -1" and seen.wrong


def test_a_chain_after_an_op_that_is_wrong_alone_is_left_out():
    one = sample("cumprod.default", torch.tensor([[1.0, 2.0, 3.0, 4.0]]), -1)
    assert_goes_wrong(on(one, "S(1)", then="times 2 | sum"), ", expected ")
    assert wrong_chains([on(one, "S(1)", then="times 2 | sum")]) == []


def test_a_step_that_is_refused_is_no_finding_and_its_gradient_is():
    uneven = sample("sin.default", numbers(5, 3))
    assert wrong_chains([on(uneven, "S(0)", then="exp | view | grad")]) == []  # the view itself is refused
    ((program, seen),) = wrong_chains([on(SIN, "R", then="exp | column | adam")])  # torch 2.13: mixed tensors
    assert (program.then, seen.wrong) == ("column | grad", "") and "mixed torch.Tensor and DTensor" in seen.refused


def test_a_chain_is_shortened_step_by_step():
    draw = random.Random(0)
    steps = [draw.choice(list(RESULT_STEPS)) for _ in range(3)]
    assert [steps_of(then) for then in shorter_chains(" | ".join(steps))] == [
        (steps[1], steps[2]), (steps[0], steps[2]), (steps[0], steps[1])
    ]  # fmt: skip
