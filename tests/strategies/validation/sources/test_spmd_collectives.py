import pytest
import torch

pytest.importorskip("spmd_types")

from strategies.model.oracle import run_oracle
from strategies.validation.probe import check_claims
from strategies.validation.sources import functions
from strategies.validation.sources.registry import source_named
from strategies.validation.sources.spmd_types import collectives


def verdicts(label):
    """The verdicts on a pair and on its gradient; empty where the function refuses the pair."""
    source, found = source_named("spmd_types"), {}
    assert label in source.labels.values()
    (call,) = collectives.calls((label,))
    sample = functions.sample_of("spmd_types", call)
    for one in (sample, *source._gradient_samples(call, sample, 0)):
        oracle = run_oracle(one)
        for i in check_claims(
            one, oracle, call.function.ranks, source.about(one, oracle, 0).claims(call.function.ranks), seed=0
        ):
            found[one.op.rpartition(".")[2]] = i.verdict.value
    return found


RIGHT = {"default": "sound", "gradient": "sound"}


@pytest.mark.parametrize("pair", [
    "all_reduce(P->R)", "all_reduce(V->I)", "all_gather(V->R)", "all_gather(S(1)->I)", "reduce_scatter(P->V)",
    "reduce_scatter(V->S(1))", "all_to_all(V->V)", "all_to_all(S(0)->S(1))", "reinterpret(R->V)", "reinterpret(I->P)",
    "convert(R->S(0))", "convert(R->I)", "convert(V->S(1))", "redistribute(P->S(0))", "redistribute(S(1)->V)",
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pair_keeps_its_definition_forward_and_backward(pair, ranks):
    assert verdicts(f"{pair} on {ranks} ranks") == RIGHT


def test_an_exchange_along_one_dim_moves_rows():
    assert set(verdicts("all_to_all(S(0)->S(0)) on 2 ranks").values()) == {"unsound"}


def test_pairs_that_a_function_refuses_are_no_claims():
    assert verdicts("all_reduce(R->P) on 2 ranks") == {}
    assert verdicts("all_to_all(V->S(0)) on 2 ranks") == {}


def test_a_wrong_definition_is_found(monkeypatch):
    monkeypatch.setattr(collectives, "_same", lambda x, ranks: 2 * x)
    assert set(verdicts("all_reduce(P->R) on 2 ranks").values()) == {"unsound"}


def test_the_code_of_a_pair_is_what_a_user_writes():
    one = collectives.functions()["reduce_scatter(P->V) on 2 ranks"]
    assert one.code() == "spmd.reduce_scatter(x[0], dist.group.WORLD, src=P, dst=V).unsqueeze(0)"
    assert torch.equal(one(one.sample()), one.sample())


def test_the_rounding_of_parts_that_the_ranks_add_up_is_no_fault():
    from strategies.validation.finding import OverloadTask
    from strategies.validation.overload import validate_overload
    from tests.strategies.cases import silent

    source = source_named("spmd_types")
    (call,) = collectives.calls(("all_reduce(P->R) on 3 ranks",))
    assert source.labels
    sample = functions.sample_of("spmd_types", call)
    samples = (sample, *source._gradient_samples(call, sample, 0))
    for one in samples:  # also with zeros, whose parts cancel
        found = validate_overload(OverloadTask(one.op, (one,) * 9, ((3,),), 0, source="spmd_types"), silent)
        assert not any(result.suspects for result in found) and any(result.sound for result in found)
