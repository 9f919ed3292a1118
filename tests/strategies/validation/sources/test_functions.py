import pytest
import torch

from strategies.model.oracle import run_oracle
from strategies.validation.sources import functions
from strategies.validation.sources.functions import FunctionCall


def sampled(call, namespace="toy_functions"):
    functions.register(namespace, call.label, call.function)
    return functions.sample_of(namespace, call)


def test_a_call_is_a_sample_whose_arguments_stand_in_text():
    x, y = torch.randn(4, 3), torch.randn(3)
    sample = sampled(FunctionCall("torch.add", torch.add, (x, y), {"alpha": 2}))
    assert sample.op == "toy_functions.torch_add.default"
    assert sample.call.args[1] == "x0, x1, alpha=2"
    (out,) = sample.call(sample.tensors)
    assert torch.equal(out, torch.add(x, y, alpha=2))


def test_lists_dtypes_and_none_have_a_form_and_infinity_has_none():
    x = torch.ones(2)
    text = functions.call_text(([x, x], (1, None)), {"dtype": torch.float64, "how": "sum"})
    assert text == "[x0, x1], (1, None,), dtype=torch.float64, how='sum'"
    args, kwargs = functions.arguments(text, [x, x])
    assert args[1] == (1, None) and kwargs == {"dtype": torch.float64, "how": "sum"} and args[0][1] is x
    assert sampled(FunctionCall("torch.clamp", torch.clamp, (x, float("inf")))) is None


def test_a_function_that_writes_to_its_argument_leaves_the_samples_tensors():
    x = torch.ones(3)
    sample = sampled(FunctionCall("torch.Tensor.add_", torch.Tensor.add_, (x, 2)))
    (out,) = sample.call(sample.tensors)
    assert out.tolist() == [3, 3, 3] and sample.tensors[0].tolist() == [1, 1, 1]


def test_a_gradient_is_a_function_of_the_tensors_and_the_cotangents():
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    call = FunctionCall("torch.mul", torch.mul, (x, y))
    sample = sampled(call)
    made = functions.gradient_sample("toy_functions", call, sample, (1,))
    assert made.op == "toy_functions.torch_mul.gradient" and len(made.tensors) == 3
    (grad,) = made.call(made.tensors)
    assert torch.equal(grad, x * made.tensors[2])
    assert functions.differentiable(made) == [0]
    assert run_oracle(made).unstable == 0


def test_a_function_without_a_gradient_has_no_sample_of_one():
    x = torch.randn(4)
    call = FunctionCall("torch.sign_int", lambda x: x.sign().long(), (x,))
    assert functions.gradient_sample("toy_functions", call, sampled(call), (0,)) is None


def test_an_in_place_function_of_a_leaf_has_a_gradient():
    x = torch.randn(3, dtype=torch.float64)
    call = FunctionCall("torch.Tensor.mul_", torch.Tensor.mul_, (x, 3))
    made = functions.gradient_sample("toy_functions", call, sampled(call), (0,))
    (grad,) = made.call(made.tensors)
    assert torch.equal(grad, 3 * made.tensors[1])


def test_a_later_function_of_a_name_takes_its_place():
    functions.register("toy_functions", "twice", lambda x: 2 * x)
    sample = sampled(FunctionCall("twice", lambda x: 3 * x, (torch.ones(1),)))
    assert sample.call(sample.tensors)[0].item() == 3


def test_a_gradient_for_too_few_cotangents_is_refused():
    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="1 results have a gradient, for 0 cotangents"):
        functions.gradients(torch.neg, [x], "x0", (0,))
