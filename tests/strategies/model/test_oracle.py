import contextlib
import itertools
import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localtensor.layout.tolerance import within_slack
from strategies.inputs import opinfo_samples
from strategies.model import oracle
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import (
    equal_within,
    metadata_only,
    metadata_only_call,
    mutates,
    random_states,
    run_oracle,
    same_results,
)
from strategies.model.rule import WRITTEN_UNDECLARED, overload
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted


def slack_of(one):
    (slack,) = run_oracle(one).slack
    return slack


def test_what_a_kernel_writes_to_without_its_schema_saying_so_is_a_result_too():
    tensors = numbers(4, 3), numbers(3, seed=1), numbers(3, seed=2), torch.zeros(3).double(), torch.ones(3).double()
    one = sample("native_batch_norm.default", *tensors, True, 0.5, 1e-5)
    assert mutates(one.op) and not overload(one.op)._schema.is_mutable
    *_, mean, variance = run_oracle(one).outputs
    assert torch.allclose(mean, tensors[0].mean(0) / 2) and torch.allclose(variance, (1 + tensors[0].var(0)) / 2)
    assert not one.tensors[3].any()  # the sample is as it was


class _Writes(TorchDispatchMode):
    """Collects the packets of functional overloads that change an argument."""

    def __init__(self):
        super().__init__()
        self.found, self.calls = set(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        if func._schema.is_mutable or func.is_view or self.calls[func] > 60:
            return func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if type(x) is torch.Tensor and x.layout == torch.strided]
        before = [x.clone() for x in given]
        out = func(*args, **(kwargs or {}))
        if not all(torch.equal(x.nan_to_num(), old.nan_to_num()) for x, old in zip(given, before, strict=True)):
            self.found.add(str(func).rpartition(".")[0])
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_functional_overload_writes_to_an_argument():
    mode = _Writes()
    for info in opinfo_samples.database():
        with contextlib.suppress(*REJECTIONS, AttributeError), mode:
            for one in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=False), 20):
                info.op(one.input, *one.args, **one.kwargs)
    assert len(mode.calls) > 300
    assert mode.found == set(WRITTEN_UNDECLARED)


# One-ulp noise gives the tolerance.


def test_the_tolerance_admits_rounding_and_refuses_an_error():
    one = sample("sum.default", numbers(50))
    (total,) = run_oracle(one).outputs
    assert equal_within(total * (1 + 4e-16), total, slack_of(one))
    assert not equal_within(total * (1 + 1e-6), total, slack_of(one))


def test_an_op_that_magnifies_noise_has_a_wider_tolerance():
    steep = sample("exp.default", torch.tensor([600.0], dtype=torch.float64))
    flat = sample("exp.default", torch.tensor([0.001], dtype=torch.float64))
    relative = [float(slack_of(one) / run_oracle(one).outputs[0]) for one in (steep, flat)]
    assert relative[0] > 5 * relative[1]


def test_the_same_seed_gives_the_same_tolerance_and_another_seed_another():
    one = sample("sum.default", numbers(50))
    same = [float(run_oracle(one, seed=seed).slack[0]) for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_complex_results_have_a_tolerance_too():
    one = sample("mul.Tensor", numbers(4, dtype=torch.complex64), numbers(4, dtype=torch.complex64, seed=1))
    want = run_oracle(one).outputs[0]
    assert 0 < float(slack_of(one)) < 0.1
    assert not equal_within(want + 0.5j, want, slack_of(one))


def test_single_precision_gets_room_for_its_distance_from_double():
    x = torch.tensor([1.0, 3.0])
    distance = 3.0 * 0.0002
    assert float(slack_of(planted("approximate", x))) >= 4 * 0.9 * distance
    assert float(slack_of(planted("approximate", x.double()))) < distance


def test_floats_of_one_byte_which_cannot_be_multiplied_are_not_moved():
    a, b = (numbers(16, 16, seed=seed).to(torch.float8_e4m3fn) for seed in (0, 1))
    one = sample("_scaled_mm.default", a, b.t(), torch.tensor(2.0), torch.tensor(1.0), out_dtype=torch.float32)
    want = a.float() @ b.float().t() * 2
    assert equal_within(run_oracle(one).outputs[0], want, slack_of(one))
    assert not equal_within(run_oracle(one).outputs[0] + 0.1, want, slack_of(one))


# Unstable elements are not compared.


def test_an_element_that_jumps_under_noise_is_not_compared_and_the_others_are():
    one = sample("floor.default", torch.tensor([2.0, 2.5], dtype=torch.float64))
    slack = slack_of(one)
    assert slack.tolist()[0] == math.inf
    assert slack[1] < 1e-6
    assert within_slack(torch.tensor([1.0, 2.0]), run_oracle(one).outputs[0], slack).tolist() == [True, True]
    assert within_slack(torch.tensor([1.0, 3.0]), run_oracle(one).outputs[0], slack).tolist() == [True, False]


def test_the_share_of_unstable_elements_is_reported():
    assert run_oracle(sample("floor.default", torch.tensor([2.0, 2.5, 3.0, 3.5]))).unstable == 0.5
    assert run_oracle(sample("exp.default", numbers(4))).unstable == 0.0


def test_an_index_that_jumps_under_noise_is_not_compared():
    tie = sample("argmax.default", torch.tensor([[1.0, 1.0, 0.0], [0.0, 5.0, 1.0]], dtype=torch.float64), 1)
    slacks = [run_oracle(tie, seed=seed).slack[0] for seed in range(4)]
    assert any(slack.ndim and slack[0].isinf() for slack in slacks)
    assert not any(slack.ndim and slack[1].isinf() for slack in slacks)


def test_an_integer_that_double_precision_gives_otherwise_is_not_compared():
    one = planted("approximate_floor", torch.tensor([4.9995, 2.5]))
    assert run_oracle(one).outputs[0].tolist() == [5, 2]
    assert slack_of(one).tolist() == [math.inf, 0.0]


# Integers and booleans are exact.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_integers_and_booleans_are_exact(dtype):
    one = sample("bitwise_not.default", numbers(6, dtype=dtype))
    assert float(slack_of(one)) == 0.0
    want = run_oracle(one).outputs[0]
    wrong = want.clone()
    wrong[3] = ~wrong[3]
    assert equal_within(want.clone(), want, slack_of(one)) and not equal_within(wrong, want, slack_of(one))


def test_integers_in_and_floats_out_are_compared_with_room_for_rounding():
    one = sample("div.Tensor", numbers(6, dtype=torch.int64), torch.tensor(7))
    want = run_oracle(one).outputs[0]
    assert want.dtype == torch.float32
    assert 0 < float(slack_of(one)) < 1e-2
    assert not equal_within(want + 0.1, want, slack_of(one))


# Vectorised against scalar kernels.


@pytest.mark.parametrize("name", ["by_lanes", "by_lanes_"])
def test_elements_that_vectorised_and_scalar_kernels_give_differently_are_not_compared(name):
    slack = slack_of(planted(name, torch.tensor([-1.0, 2.0, -3.0])))
    assert slack.isinf().tolist() == [False, True, False]


# Ops that write.


@pytest.mark.parametrize("one", [
    sample("add_.Tensor", numbers(3), numbers(3, seed=1)),
    sample("add_.Tensor", numbers(3, dtype=torch.int64), numbers(3, dtype=torch.int64, seed=1)),
    sample("index_put_.default", numbers(3), [torch.tensor([1])], numbers(1, seed=1)),
    sample("exp.out", numbers(3), out=torch.zeros(3, dtype=torch.float64)),
], ids=lambda one: one.op)  # fmt: skip
def test_ops_that_write_leave_the_sample_as_it_is(one):
    before = [t.clone() for t in one.tensors]
    first, second = run_oracle(one), run_oracle(one)
    assert mutates(one.op)
    assert all(torch.equal(t, b) for t, b in zip(one.tensors, before, strict=True))
    assert torch.equal(first.outputs[0], second.outputs[0])
    assert all(torch.equal(t, b) for t, b in zip(first.inputs, before, strict=True))


def test_an_argument_that_is_written_to_and_not_returned_is_a_result_too():
    x, sums = numbers(3, 2), torch.zeros(2, dtype=torch.float64)
    oracle = run_oracle(planted("noted", x, sums))
    assert [torch.equal(got, want) for got, want in zip(oracle.outputs, (x * 2, x.sum(0)), strict=True)] == [True, True]
    assert len(oracle.slack) == 2
    assert torch.equal(oracle.raw, x * 2)
    assert not sums.any()


# Random and uninitialised results.


@pytest.mark.parametrize(("op", "why"), [
    ("aten.rand_like.default", "random: judged by metadata only"),
    ("aten.bernoulli_.float", "random: judged by metadata only"),
    ("aten.native_dropout.default", "random: judged by metadata only"),
    ("aten.empty_like.default", "uninitialised: judged by metadata only"),
    ("aten.new_empty_strided.default", "uninitialised: judged by metadata only"),
    ("aten.resize_.default", "uninitialised: judged by metadata only"),
    ("aten.relu.default", ""),
    ("aten.new_zeros.default", ""),
])  # fmt: skip
def test_random_and_uninitialised_ops_say_that_only_metadata_count(op, why):
    assert metadata_only(op) == why


@pytest.mark.parametrize("op", ["rand_like.default", "empty_like.default"])
def test_the_oracle_of_such_an_op_has_no_tolerance(op):
    oracle = run_oracle(sample(op, numbers(3)))
    assert oracle.metadata_only == metadata_only(f"aten.{op}")
    assert oracle.slack == (None,)


def test_half_precision_complex_numbers_cannot_be_compared():
    oracle = run_oracle(sample("_to_copy.default", numbers(3, dtype=torch.complex64), dtype=torch.complex32))
    assert oracle.metadata_only == "complex32, which torch cannot compare: judged by metadata only"


# Refusals.


def test_an_op_that_refuses_its_sample_raises_one_of_the_refusals():
    with pytest.raises(REJECTIONS, match="mat1 and mat2"):
        run_oracle(sample("mm.default", numbers(2, 3), numbers(2, 3)))


def test_noise_that_leaves_the_ops_domain_costs_only_the_tolerance():
    oracle = run_oracle(planted("fussy", torch.ones(9, dtype=torch.float64)))
    assert oracle.outputs[0].tolist() == [2.0] * 9
    assert float(oracle.slack[0]) < 1e-9


# Shapes and values at the edges.


@pytest.mark.parametrize("shape", [(0,), (0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_empty_and_zero_dimensional_results_have_a_tolerance(shape, dtype):
    one = sample("clone.default", numbers(*shape, dtype=dtype))
    assert equal_within(one.tensors[0], run_oracle(one).outputs[0], slack_of(one))


def test_not_a_number_and_infinity_are_what_they_are():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=torch.float64)
    one = sample("mul.Scalar", x, 2.0)
    want, slack = run_oracle(one).outputs[0], slack_of(one)
    assert equal_within(x * 2, want, slack)
    for spot in range(3):
        wrong = (x * 2).index_fill(0, torch.tensor([spot]), 7.0)
        assert not equal_within(wrong, want, slack)


def test_a_number_that_is_none_is_wrong_where_the_op_gives_one():
    want = torch.tensor([1.0, float("nan")])
    room = torch.tensor(0.5)
    assert within_slack(torch.tensor([float("nan"), float("nan")]), want, room).tolist() == [False, True]
    assert within_slack(torch.tensor([1.2, 1.0]), want, room).tolist() == [True, False]


def test_results_that_are_no_tensors_have_no_tolerance():
    assert run_oracle(sample("is_nonzero.default", torch.tensor(3.0))).slack == (None,)


def test_each_result_has_a_tolerance_of_its_own():
    oracle = run_oracle(sample("max.dim", numbers(4, 3), 0))
    assert [float(slack) > 0 for slack in oracle.slack] == [True, False]


def test_other_values_may_stand_in_for_the_samples_own():
    one = sample("neg.default", numbers(3))
    assert run_oracle(one, [torch.ones(3)]).outputs[0].tolist() == [-1.0, -1.0, -1.0]


# The very same results.


def test_the_same_call_in_another_spelling_gives_the_same_results():
    x = numbers(3, 4).index_fill(1, torch.tensor([2]), math.nan)
    assert same_results(run_oracle(sample("sum.dim_IntList", x, [1])), run_oracle(sample("sum.dim_IntList", x, [-1])))


@pytest.mark.parametrize("other", [
    sample("sum.dim_IntList", numbers(3, 3), [0]),
    sample("sum.dim_IntList", numbers(3, 3), [1], True),
    sample("sum.dim_IntList", numbers(3, 3), [1], dtype=torch.float32),
    sample("max.dim", numbers(3, 3), 1),
], ids=lambda one: str(one.arguments()))  # fmt: skip
def test_other_values_shapes_dtypes_or_counts_are_not_the_same_results(other):
    assert not same_results(run_oracle(sample("sum.dim_IntList", numbers(3, 3), [1])), run_oracle(other))


def test_the_same_values_in_another_dtype_are_not_the_same_results():
    single, double = (
        run_oracle(sample("clone.default", torch.arange(4.0, dtype=d))) for d in (torch.float32, torch.float64)
    )
    assert not same_results(single, double)


def attention(dropout):
    q, k, v = numbers(1, 2, 3, 8), numbers(1, 2, 3, 8), numbers(1, 2, 3, 8)
    return sample("_scaled_dot_product_flash_attention_for_cpu.default", q, k, v, dropout)


def test_attention_without_dropout_draws_nothing_and_its_values_count():
    oracle = run_oracle(attention(0.0))
    assert oracle.metadata_only == ""
    assert all(slack is not None for slack in oracle.slack)
    assert metadata_only_call(attention(0.5)) == "random: judged by metadata only"


def test_the_backward_of_attention_with_dropout_masks_what_the_state_of_a_generator_says():
    name = "_scaled_dot_product_flash_attention_for_cpu_backward.default"
    x, sums = numbers(1, 2, 3, 8), numbers(1, 2, 3)
    backward = [sample(name, x, x, x, x, x, sums, dropout, False) for dropout in (0.5, 0.0)]
    assert [metadata_only_call(one) for one in backward] == ["random: judged by metadata only", ""]


@pytest.mark.parametrize(("op", "states"), [
    ("_scaled_dot_product_flash_attention", {6, 7}),
    ("_scaled_dot_product_efficient_attention", {2, 3}),
    ("relu", set()),
])  # fmt: skip
def test_states_of_generators_among_the_results_are_known_by_name(op, states):
    assert random_states(f"aten.{op}.default") == states


def test_the_noise_of_small_calls_is_drawn_once_for_each_shape_and_dtype(monkeypatch):
    """It is that which a new generator draws; of large ones nothing is kept."""
    drawn, randint = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: drawn.append(args) or randint(*args, **kwargs))
    oracle._ulps.cache_clear()
    x, z, indices = numbers(4, 6), numbers(4, 6).to(torch.complex64), torch.arange(3)
    first = oracle._perturbed([x, indices, z], 5)
    assert len(drawn) == 4
    again = oracle._perturbed([x + 1, indices, z], 5)
    assert len(drawn) == 4 and [copy[1].tolist() for copy in (*first, *again)] == [[0, 1, 2]] * 4
    factors = oracle._ulps.__wrapped__(((x.shape, x.dtype, x.device), (z.shape, z.dtype, z.device)), 5)
    for one, two, (of_x, of_z) in zip(first, again, factors, strict=True):
        assert torch.equal(one[0], x * of_x) and torch.equal(two[0], (x + 1) * of_x) and not torch.equal(one[0], x)
        assert torch.equal(one[2], z * of_z) and torch.equal(two[2], z * of_z)
    assert not torch.equal(first[0][0], first[1][0])
    oracle._perturbed([x, indices, z], 6)
    assert len(drawn) == 12
    large = numbers(80, 80)
    for _ in range(2):
        oracle._perturbed([large], 5)
    assert len(drawn) == 16
