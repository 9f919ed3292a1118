"""Op calls from torch's database: each private part by its name, the same calls each time, and what is refused."""

import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from localtensor.testing import draws
from localtensor.testing.hypothesis_strategies.op_calls import (
    MOST_NUMEL,
    OpCall,
    full_names,
    opinfo_database,
    sample_count,
    supports_dtype,
)
from tests.tools import warm


def test_torch_has_the_parts_that_the_module_names():
    from torch.testing._internal.common_methods_invocations import op_db  # seconds, which collecting does without

    for info in op_db:
        assert isinstance(info.name, str) and isinstance(info.variant_test_name, str) and callable(info.op)
        assert torch.float32 in info.supported_dtypes("cpu") or info.supports_autograd in (True, False)
    drawn = iter(op_db[0].sample_inputs("cpu", torch.float32))
    assert drawn.set_seed in (True, False)
    sample = next(drawn)
    assert isinstance(sample.input, torch.Tensor) and isinstance(sample.args, tuple) and isinstance(sample.kwargs, dict)
    assert len(opinfo_database()) == len(op_db)


def test_the_packages_are_imported_without_the_database_and_the_strategy_too():
    look = ("from localtensor.testing import draws; draws.op_calls(['add']); import sys; "
            "sys.exit('torch.testing._internal.common_methods_invocations' in sys.modules)")  # fmt: skip
    assert warm.run([sys.executable, "-c", look]).returncode == 0


@settings(max_examples=60)
@given(draws.op_calls(["add", "mul", "div", "cat", "nn.functional.linear"], dtypes=(torch.float32, torch.int64)))
def test_a_call_can_be_made_and_its_print_makes_the_same_again(call):
    again = eval(repr(call), {"OpCall": draws.OpCall, "torch": torch})
    assert again == call and again.says == call.says and "0x" not in call.says
    torch.testing.assert_close(call.call(), again.call(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(call.call(), call.op(*call.args, **call.kwargs), rtol=0, atol=0, equal_nan=True)


def test_lists_and_tuples_of_one_are_written_as_python_writes_them():
    assert OpCall("flip", torch.float32, 3).says == "flip(f32[5,10,5], dims=(-1,))"
    assert OpCall("einsum", torch.float32, 0).says == "einsum([f32[3]], 'i->')"
    assert OpCall("permute", torch.float32, 0).says == "permute(f32[1,2,3,4], (0, 2, 3, 1))"


def test_the_tensors_belong_to_the_caller():
    one, other = OpCall("add", torch.float32, 1), OpCall("add", torch.float32, 1)
    one.args[0].fill_(7)
    assert not torch.equal(one.args[0], other.args[0])
    assert torch.equal(OpCall("add", torch.float32, 1).args[0], other.args[0])
    assert not torch.equal(OpCall("add", torch.float32, 1, seed=1).args[0], other.args[0])


def test_no_ones_random_numbers_are_touched():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    want = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    OpCall("sub", torch.float32, 2, seed=77)
    assert torch.equal(torch.rand(3), want[0]) and random.random() == want[1] and np.random.rand() == want[2]


def test_a_name_is_all_variants_of_it():
    found = full_names(["div"], (torch.float32,))
    assert found == ("div.no_rounding_mode", "div.trunc_rounding", "div.floor_rounding")
    assert full_names(["div.floor_rounding", "add"], (torch.float32,)) == ("div.floor_rounding", "add")
    assert len(full_names(None, (torch.float32,))) > 500


def test_ops_that_do_not_know_the_dtype_do_not_come():
    assert full_names(["add", "nn.functional.relu"], (torch.bool,)) == ("add",)
    assert supports_dtype("add", torch.bool) and not supports_dtype("linalg.qr", torch.int64)


def test_samples_are_small_and_a_number_past_the_last_begins_again():
    many = sample_count("grid_sampler_3d", torch.float32, 0)
    assert all(x.numel() <= MOST_NUMEL for n in range(many) for x in OpCall("grid_sampler_3d", torch.float32, n).args
               if isinstance(x, torch.Tensor))  # fmt: skip
    many = sample_count("add", torch.float32, 0)
    assert OpCall("add", torch.float32, many).says == OpCall("add", torch.float32, 0).says


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: full_names(["ad"], (torch.float32,)), r"^draws.op_calls: names: names='ad': .* no such op\. Did you mean "),
        (lambda: full_names(["qqq"], (torch.float32,)), r"has no such op\. Names are those of torch's OpInfos"),
        (lambda: full_names(["linalg.qr"], (torch.int64,)), r"none of them knows torch\.int64"),
        (lambda: OpCall("div", torch.float32, 0), r"^draws.OpCall: name: name='div': it is several variants"),
        (lambda: OpCall("linalg.qr", torch.int64, 0), r"torch has no sample of it for torch\.int64 on a CPU"),
        (lambda: OpCall("add", torch.float32, -1), "^draws.OpCall: number: "),
        (lambda: OpCall("add", None, 0), "^draws.OpCall: dtype: "),
        (lambda: OpCall("add", torch.float32, 0, 0, "add(f32[9])"), r"^draws.OpCall: says: .*: in this torch it is add\(f32\[\], f32\[\]\)\. L"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused(make, text):
    with pytest.raises(draws.BadDraw, match=text):
        make()


def test_an_unknown_name_is_refused_when_the_first_call_is_drawn():
    @given(draws.op_calls(["not_an_op"]))
    def never_runs(call):
        raise AssertionError(call)

    with pytest.raises(draws.BadDraw, match="not_an_op"):
        never_runs()
