import pytest
import torch

from strategies.model.oracle import OracleResult, run_oracle
from strategies.model.rule import PUBLIC, placements_text
from strategies.programs.run import program_oracle
from strategies.programs.run.program_oracle import (
    has_partial,
    oracle_of_program,
    oracle_of_sample,
    program_call,
    tensors_made,
)
from tests.strategies.cases import numbers, sample
from tests.strategies.programs_of import on

X = numbers(4, 3)


def slack_of(one, then, **options):
    return oracle_of_sample(one, then, **options).slack[0]


def test_the_op_alone_is_its_own_call():
    one = sample("neg.default", X)
    assert program_call(on(one, "R")) is one.call
    assert program_call(on(one, "R", then="sum")).op == one.op


def test_the_oracle_is_that_of_the_op_and_what_follows():
    oracle = oracle_of_program(on(sample("exp.default", X), "P(sum)", then="sum 0"))
    torch.testing.assert_close(oracle.outputs[0], X.exp().sum(0))
    assert float(oracle.slack[0]) < 1e-8


def test_what_plain_tensors_refuse_is_no_program():
    with pytest.raises(RuntimeError):
        oracle_of_program(on(sample("argmax.default", X), "R", then="grad"))


def test_there_is_room_for_what_adding_up_may_lose():
    """A total of zero has parts that are not, which add up to zero only nearly."""
    one = sample("mul.Tensor", torch.zeros(3, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64))
    assert float(run_oracle(one).slack[0]) < 1e-20
    assert 1e-14 < float(slack_of(one, "R")) < 1e-10
    assert float(slack_of(one, "R", partial=False)) < 1e-20


def test_there_is_room_for_the_last_digits_of_what_cancels():
    """A number less its own mean is zero however its inputs move; ranks, which add in another order, miss it by an ulp."""
    one = sample("sum.default", numbers(4, 3))
    assert float(oracle_of_sample(one, "less its mean").outputs[0]) == 0
    assert 1e-16 < float(slack_of(one, "less its mean", partial=False)) < 1e-10


@pytest.mark.parametrize("seed", range(4))
def test_equal_elements_of_two_tensors_may_differ_after_parts_are_added(seed):
    one = sample("ne.Tensor", X, X.clone())
    assert slack_of(one, "", seed=seed).isinf().all()
    assert not slack_of(sample("ne.Tensor", X, X + 1), "", seed=seed).isinf().any()


@pytest.mark.parametrize(("dtype", "compared"), [(torch.int64, True), (torch.float64, False)], ids=str)
def test_a_text_is_compared_if_noise_does_not_change_it(dtype, compared):
    oracle = oracle_of_sample(sample("alias.default", (X * 10).to(dtype)), f"{PUBLIC}str(x.sum().item()) of int64")
    assert isinstance(oracle.outputs[0], str) and (oracle.slack[0] is not None) is compared


def test_a_text_that_only_a_larger_move_of_the_inputs_changes_is_not_compared(monkeypatch):
    """A float's text changes with each ulp; the noise of one ulp is left out here."""
    monkeypatch.setattr(
        program_oracle, "run_oracle", lambda followed, seed: OracleResult((), ("31.5",), (torch.zeros(()),), "31.5")
    )
    assert oracle_of_sample(sample("alias.default", X), f"{PUBLIC}str(x.sum().item()) of int64").slack == (None,)


@pytest.mark.parametrize(("program", "made"), [
    (on(sample("neg.default", X), "S(0)"), []),
    (on(sample("neg.default", X), "S(0)", then="grad S(0)"), [("gradient", (4, 3), "S(0)")]),
    (on(sample("neg.default", X), "S(0)/R", (2, 2), "grad S(0)"), [("gradient", (4, 3), "(S(0), R)")]),
    (on(sample("sum.default", X), "S(0)", then="grad S(0)"), [("gradient", (), "R")]),
    (on(sample("alias.default", X), "S(0)", then=f"{PUBLIC}x.data = y, y in [Shard(1)]"), [("argument", (4, 3), "S(1)")]),
    (on(sample("alias.default", X), "R", then=f"{PUBLIC}local_map(a @ b, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()],), "
        "in_grad_placements=([Shard(0)], [Partial('sum')],))"), [("argument", (3, 12), "R")]),  # within the text of the step itself
], ids=str)  # fmt: skip
def test_tensors_that_steps_make_are_found_with_their_layouts(program, made):
    assert [(kind, tuple(x.shape), placements_text(layout)) for kind, x, layout in tensors_made(program)] == made


@pytest.mark.parametrize("then", ["cast int64", "cast bool"])
def test_a_jump_at_a_value_is_not_compared(then):
    one = sample("alias.default", torch.tensor([4.0, 0.0, 2.5], dtype=torch.float64))
    slack = slack_of(one, then)
    assert slack.isinf().tolist() == [then == "cast int64", then == "cast bool", False]


def test_the_gradient_at_a_kink_is_not_compared():
    one = sample("abs.default", torch.tensor([0.0, 1.5], dtype=torch.float64))
    assert slack_of(one, "grad").isinf().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
], ids=str)  # fmt: skip
def test_there_is_an_oracle_for_every_dtype(dtype):
    one = sample("alias.default", numbers(4, 3).to(dtype))
    assert bool((oracle_of_sample(one, "slice").outputs[0] == one.tensors[0][1:]).all())
    assert slack_of(one, "slice").isfinite().all()


def test_a_number_of_one_byte_is_not_compared_where_it_jumps():
    """Halfway between two of them it is either."""
    one = sample("_to_copy.default", torch.tensor([1.0625, 1.25]), dtype=torch.float8_e4m3fn)
    assert slack_of(one, "").isinf().tolist() == [True, False]


def test_the_same_program_has_the_same_oracle():
    one = sample("softmax.int", X.float(), 0)
    assert torch.equal(slack_of(one, "grad"), slack_of(one, "grad"))


def test_random_results_are_not_compared():
    assert oracle_of_sample(sample("rand_like.default", X), "sum").metadata_only


def test_partial_inputs_are_distinguished_from_others():
    one = sample("neg.default", X)
    assert [has_partial(on(one, text, (2, 2))) for text in ("R/P(sum)", "S(0)", "R")] == [True, False, False]


def test_what_follows_is_not_held_to_more_than_the_op_itself_gives():
    coarse = oracle_of_sample(sample("div.Tensor", torch.tensor([1, 2]), torch.tensor([3, 7])), "cast float64")
    fine = oracle_of_sample(sample("neg.default", numbers(2)), "cast float64")
    assert float(coarse.slack[0].max()) > 1e-5 > float(fine.slack[0].max())
