import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localtensor._util.pickling import dumps, loads

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex32]


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")  # torch's own, for complex32
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (0, 4)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_comes_back(dtype, shape):
    x = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    y = loads(dumps(x))
    assert y.dtype == dtype and y.shape == x.shape
    assert y.tolist() == x.tolist()


def test_a_tensor_that_wants_a_gradient_still_does():
    x = loads(dumps(torch.ones(2, requires_grad=True)))
    assert x.requires_grad and x.tolist() == [1.0, 1.0]


@given(st.permutations([0, 1, 2]))
def test_dense_strides_are_kept(order):
    x = torch.arange(24).reshape(2, 3, 4).permute(*order)
    y = loads(dumps(x))
    assert y.stride() == x.stride()
    assert torch.equal(x, y)


def test_an_expanded_or_sliced_tensor_comes_back_dense():
    for x in (torch.arange(3).expand(4, 3), torch.arange(12).reshape(3, 4)[:, 1:3]):
        y = loads(dumps(x))
        assert torch.equal(x, y) and y.is_contiguous()


def test_a_lazily_conjugated_tensor_keeps_its_value():
    x = torch.tensor([1 + 2j]).conj()
    assert loads(dumps(x)).tolist() == [1 - 2j]


def test_an_overload_is_the_same_object():
    assert loads(dumps(torch.ops.aten.add.Tensor)) is torch.ops.aten.add.Tensor
