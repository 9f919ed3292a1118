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


@pytest.mark.parametrize("x", [
    torch.arange(6.0)[::2], torch.arange(6.0).reshape(3, 2)[:, 1], torch.arange(3).expand(4, 3), torch.ones(2)[:0:2],
    torch.ones(4).as_strided((1,), (2,)), torch.ones(4).as_strided((3, 1), (1, 5)), torch.tensor(1j).conj(),
], ids=["every second", "a column", "expanded", "empty", "one element", "a dim of one", "a conjugate number"])  # fmt: skip
def test_values_of_any_strides_come_back(x):
    y = loads(dumps(x))
    assert y.tolist() == x.tolist() and y.dtype == x.dtype


@pytest.mark.parametrize("x", [
    torch.arange(3).expand(4, 3), torch.arange(12).reshape(3, 4)[:, 1:3], torch.tensor([1 + 2j]).conj(),
], ids=["expanded", "sliced", "conjugate"])  # fmt: skip
def test_views_are_kept_where_that_is_asked_for(x):
    y = loads(dumps(x, views=True))
    assert (y.stride(), y.is_conj(), y.tolist()) == (x.stride(), x.is_conj(), x.tolist())


def test_a_slice_that_wants_a_gradient_keeps_its_strides():
    x = torch.ones(3, 4)[:, 1:3].requires_grad_()
    y = loads(dumps(x))
    assert y.requires_grad and y.stride() == x.stride()


def test_an_attribute_of_a_tensor_is_kept():
    x = torch.ones(2)
    x.note = "mine"
    assert loads(dumps(x)).note == "mine"


def test_what_comes_back_is_memory_of_torch_s_own():
    assert loads(dumps(torch.ones(2))).resize_(100).shape == (100,)


def test_an_overload_is_the_same_object():
    assert loads(dumps(torch.ops.aten.add.Tensor)) is torch.ops.aten.add.Tensor


def test_a_default_device_changes_nothing():
    x = torch.arange(3.0)
    with torch.device("meta"):
        sent = dumps(x)
    assert torch.equal(loads(sent), x)
