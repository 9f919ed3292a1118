"""OpInfo is imported by the tests that ask it (seconds); most stand-ins here are OpInfos of a few lines."""

import contextlib
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.inputs import opinfo_samples
from strategies.inputs.opinfo_samples import (
    ATTENTION,
    SIZES,
    _kernels,
    bearers,
    capture_calls,
    database,
    names,
    opinfo_sizes,
    seed_all,
)
from strategies.model.rule import overload
from strategies.model.settings import DTYPES, torch_dtype
from tests.strategies.cases import numbers


@dataclass
class Input:
    """One sample of an OpInfo."""

    input: Any
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    broadcasts_input: bool = False


@dataclass
class Info:
    """The parts of an OpInfo that the room reads."""

    op: Any
    inputs: Any
    name: str = "stand_in"
    inplace_variant: Any = None
    supports_autograd: bool = True
    aten_name: str = ""
    aliases: tuple = ()

    @property
    def formatted_name(self):
        return self.name

    def sample_inputs(self, device, dtype, requires_grad=False):
        for made in self.inputs(dtype):
            if requires_grad and isinstance(made.input, Tensor):
                made.input.requires_grad_()
            yield made

    def __call__(self, *args, **kwargs):
        return self.op(*args, **kwargs)


def wanted(*ops):
    return lambda func: not ops or str(func) in ops


def captured(info, dtype=torch.float64, *, seed=0, ops=(), which="odd"):
    return capture_calls(info, dtype, which, device="cpu", seed=seed, wanted=wanted(*ops))


def inputs(*shapes):
    return lambda dtype: [Input(numbers(*shape, dtype=dtype)) for shape in shapes]


@pytest.fixture(scope="module")
def infos():
    """torch's own, by name."""
    return {info.formatted_name: info for info in reversed(opinfo_samples.database())}


# The sizes that OpInfo samples are made of.


def sizes_now():
    from torch.testing._internal import common_methods_invocations as home

    return tuple(getattr(home, name) for name in ("L", "M", "S", "XS"))


def test_sizes_hold_inside_and_are_put_back(infos):
    before = sizes_now()
    with opinfo_sizes("even"):
        assert sizes_now() == SIZES["even"]
    assert sizes_now() == before == SIZES["odd"]


def test_sizes_are_put_back_after_an_error(infos):
    with pytest.raises(ZeroDivisionError), opinfo_sizes("even"):
        raise ZeroDivisionError
    assert sizes_now() == SIZES["odd"]


def test_two_ranks_can_halve_every_even_size():
    assert all(size % 2 == 0 for size in SIZES["even"])
    assert any(size % 2 for size in SIZES["odd"])


def test_the_two_passes_draw_other_shapes(infos):
    odd, even = (captured(infos["cumsum"], ops=["aten.cumsum.default"], which=which)[0] for which in ("odd", "even"))
    shapes = [{tuple(one.tensors[0].shape) for one in found} for found in (odd, even)]
    assert (5, 5, 5) in shapes[0] - shapes[1]
    assert (4, 4, 4) in shapes[1] - shapes[0]


# Capture, with torch's own samples.


def test_the_same_seed_draws_the_same_samples_and_another_seed_others(infos):
    first, again, other = (captured(infos["mul"], seed=seed, ops=["aten.mul.Tensor"])[0] for seed in (3, 3, 4))
    assert [one.arguments() for one in first] == [one.arguments() for one in again]
    assert all(
        torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x.tensors, y.tensors, strict=True)
    )
    assert not torch.equal(first[0].tensors[0], other[0].tensors[0])


def test_forward_backward_and_in_place_calls_are_met(infos):
    found, failed = captured(infos["tanh"])
    stages = {one.op: one.origin.split(" ", 2)[2] for one in found}
    assert stages["aten.tanh.default"] == "forward"
    assert stages["aten.tanh_backward.default"] == "backward"
    assert stages["aten.tanh_.default"] == "in place"
    assert not failed


def test_integers_have_no_backward(infos):
    found, _ = captured(infos["abs"], torch.int64)
    assert {one.op for one in found} == {"aten.abs.default", "aten.abs_.default"}


def test_an_infos_origin_says_where_its_samples_come_from(infos):
    found, _ = captured(infos["cumsum"], ops=["aten.cumsum.default"])
    assert found[0].origin.startswith("cumsum[float64,odd] #")


def test_samples_with_lengths_written_for_one_size_are_not_drawn_in_another(infos):
    name = next(iter(opinfo_samples.ONE_SIZE))
    assert captured(infos[name], which="even")[0] == []
    assert captured(infos[name], which="odd")[0]


def test_an_info_is_found_by_all_its_names(infos):
    assert {"linalg.vector_norm", "linalg_vector_norm"} <= names(infos["linalg_vector_norm"])
    assert "arccos" in names(infos["acos"])


# Capture, with stand-ins.


def test_only_wanted_overloads_are_kept():
    found, _ = captured(Info(lambda x: x.neg().exp(), inputs((2, 3))), ops=["aten.exp.default"])
    assert [one.op for one in found] == ["aten.exp.default"]


def test_a_call_that_the_op_refuses_is_no_sample():
    def refuses_the_second(x):
        return torch.mm(x, x)

    found, failed = captured(Info(refuses_the_second, inputs((3, 3), (2, 3), (4, 4)), supports_autograd=False))
    assert [one.arguments()[0] for one in found] == ["f64[3,3]", "f64[4,4]"]
    assert sum(failed.values()) == 1
    assert next(iter(failed)).startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_generator_of_samples_that_raises_costs_only_what_it_did_not_give():
    def two_then_none(dtype):
        yield Input(numbers(2))
        yield Input(numbers(3))
        raise RuntimeError("no more on this device")

    found, failed = captured(Info(torch.neg, two_then_none, supports_autograd=False))
    assert [one.arguments() for one in found] == [["f64[2]"], ["f64[3]"]]
    assert failed == {"RuntimeError: no more on this device": 1}


def test_what_is_no_refusal_is_not_swallowed():
    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        captured(Info(broken, inputs((2,))))


def test_an_in_place_call_is_kept_as_it_was_before_it_wrote():
    info = Info(torch.neg, inputs((3,)), inplace_variant=torch.neg_)
    found, _ = captured(info, ops=["aten.neg_.default"])
    assert torch.equal(found[0].tensors[0], numbers(3))


def test_an_input_that_is_broadcast_is_not_written_to():
    info = Info(torch.neg, lambda dtype: [Input(numbers(3), broadcasts_input=True)], inplace_variant=torch.neg_)
    assert [one.op for one in captured(info, ops=["aten.neg.default", "aten.neg_.default"])[0]] == ["aten.neg.default"]


def test_the_backward_calls_of_every_result_are_met():
    found, _ = captured(Info(lambda x: (x.tanh(), x.sigmoid()), inputs((2, 3))))
    assert {"aten.tanh_backward.default", "aten.sigmoid_backward.default"} <= {one.op for one in found}


def test_the_gradients_of_a_sample_do_not_depend_on_the_order_of_work():
    found = []
    for _ in range(2):
        torch.rand(7)
        calls, _ = captured(Info(torch.tanh, inputs((2, 3))), ops=["aten.tanh_backward.default"])
        found.append(calls[0].tensors)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_same_call_twice_is_kept_once():
    assert len(captured(Info(lambda x: x.neg() + x.neg(), inputs((2, 3)), supports_autograd=False))[0]) == 2


def test_the_same_call_again_and_again_does_not_crowd_out_another():
    shapes = [(2, 2)] * (opinfo_samples.MOST_MET + 1) + [(3, 3)]
    found, _ = captured(Info(torch.neg, inputs(*shapes), supports_autograd=False))
    assert [one.arguments() for one in found] == [["f64[2,2]"], ["f64[3,3]"]]


def test_calls_met_on_the_way_are_few_and_those_of_the_infos_own_name_many():
    shapes = list(itertools.product((1, 2, 3), repeat=2))
    met, _ = captured(Info(torch.neg, inputs(*shapes), supports_autograd=False))
    own, _ = captured(Info(torch.neg, inputs(*shapes), name="neg", supports_autograd=False))
    assert len(met) == opinfo_samples.MOST_OTHERS
    assert len(own) == len(shapes) > opinfo_samples.MOST_OTHERS


def test_no_more_samples_are_run_than_is_allowed_and_they_come_from_all_over():
    ran = []
    captured(Info(lambda x: ran.append(len(x)), inputs(*[(n,) for n in range(200)]), supports_autograd=False))
    assert len(ran) == opinfo_samples.MOST_CALLS
    assert ran == sorted(set(ran))
    assert ran[0] == 0 and ran[-1] > 190


def test_an_op_that_trusts_its_caller_is_met_with_the_operands_of_more_dims_that_its_caller_takes():
    def two(dtype):
        yield Input(2 + torch.eye(3, dtype=dtype), (numbers(3, 1, dtype=dtype),))
        yield Input(2 + torch.eye(3, dtype=dtype).expand(2, 3, 3), (numbers(2, 3, 1, dtype=dtype),))

    solved, failed = captured(Info(torch.linalg.solve, two, "linalg.solve", supports_autograd=False))
    shapes = [[tuple(x.shape) for x in one.tensors] for one in solved if one.op == "aten._linalg_solve_ex.default"]
    assert [(2, 3, 3), (2, 2, 3, 1)] in shapes and [(2, 2, 3, 3), (2, 3, 1)] in shapes
    assert len(shapes) == 2 + opinfo_samples.MOST_BROADCAST and not failed
    assert {one.origin for one in solved} >= {"linalg.solve[float64,odd] #1, operand 1 with one more dim, forward"}
    multiplied, _ = captured(Info(torch.matmul, two, "matmul", supports_autograd=False))
    more = [one.op for one in multiplied if "one more dim" in one.origin]
    assert set(more) == {"aten._unsafe_view.default"}  # the forms of all others are our own


def test_an_operand_of_which_an_op_reads_the_first_elements_alone_gets_no_more_dims():
    def images(dtype):
        yield Input(numbers(2, 3, 4, dtype=dtype), (numbers(3, dtype=dtype),))

    def normed(x, w):
        return torch.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)

    found, _ = captured(Info(normed, images, "native_batch_norm"))
    assert found and not any("one more dim" in one.origin for one in found)


def test_an_op_that_takes_integers_gets_no_operand_of_more_dims():
    def pivoted(dtype):
        yield Input(torch.eye(3, dtype=dtype).expand(2, 3, 3), (torch.ones(2, 3, dtype=torch.int32).cumsum(1).int(),))

    found, _ = captured(Info(lambda x, p: torch.lu_unpack(x.clone(), p)[2] * 1, pivoted))
    assert found and not any("one more dim" in one.origin for one in found)


@pytest.mark.parametrize("made", [
    torch.eye(3).to_sparse(),
    torch.zeros(opinfo_samples.MOST_NUMEL + 1),
], ids=["sparse", "large"])  # fmt: skip
def test_tensors_that_cannot_be_split_as_plain_ones_are_no_samples(made):
    assert captured(Info(lambda x: x.clone(), lambda dtype: [Input(made)], supports_autograd=False))[0] == []


def test_a_call_with_a_generator_is_no_sample():
    rng = torch.Generator()
    info = Info(
        lambda x: torch.bernoulli(x, generator=rng), lambda dtype: [Input(torch.zeros(3))], supports_autograd=False
    )
    assert captured(info)[0] == []


def test_lazy_conjugates_are_resolved():
    info = Info(lambda x: x.conj().exp(), inputs((3,)), supports_autograd=False)
    found, _ = captured(info, torch.complex64, ops=["aten.exp.default"])
    assert not found[0].tensors[0].is_conj()
    assert torch.equal(found[0].tensors[0], numbers(3, dtype=torch.complex64).conj().resolve_conj())


def test_one_seed_sets_every_generator():
    drawn = []
    for _ in range(2):
        seed_all(1, "add")
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
    seed_all(1, "sub")
    assert drawn[0] == drawn[1]
    assert torch.rand(1).item() != drawn[0][0]


def test_names_of_a_stand_in_need_no_aten_name():
    assert names(SimpleNamespace(name="a", aten_name=None, aliases=[SimpleNamespace(name="b")])) == {"a", "b"}


def test_the_dtypes_of_a_sweep_are_torchs_own():
    assert [str(torch_dtype(name)) for name in DTYPES] == [f"torch.{name}" for name in DTYPES]
    assert overload("aten.neg.default") is torch.ops.aten.neg.default


@pytest.mark.parametrize(("op", "expected"), [
    ("_scaled_dot_product_cudnn_attention_backward", "nn.functional.scaled_dot_product_attention"),
    ("_fused_rms_norm_backward", "nn.functional.rms_norm"),
])  # fmt: skip
def test_the_opinfo_of_a_kernel_that_a_gpu_alone_has_is_found_by_its_words(op, expected):
    found = [database()[n].name for n in bearers([f"aten.{op}.default"])]
    assert expected in found
    assert len(found) < 5
    assert bearers(["aten.relu.default"]) == []


def test_on_the_cpu_attention_runs_by_torchs_own_choice_alone():
    info = next(one for one in database() if one.name == ATTENTION)
    assert list(_kernels(info, torch.float32, "cpu")) == [contextlib.nullcontext]
    assert len(list(_kernels(info, torch.float32, "cuda"))) == 4
    assert list(_kernels(info, torch.float64, "cuda")) == [contextlib.nullcontext]
