import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import localtensor as lt
from localtensor.testing import assert_same

NAN = float("nan")
SAME = {
    "tensors": ([torch.arange(3), 1.5], [torch.arange(3), 1.5]),
    "nan": ([torch.tensor([NAN, 1]), NAN], [torch.tensor([NAN, 1]), NAN]),
    "containers": ([{"a": [1, (torch.ones(2), "x")]}], [{"a": [1, (torch.ones(2), "x")]}]),
    "modules": ([torch.nn.Linear(2, 2)], None),
    "sparse": ([torch.eye(2).to_sparse()], [torch.eye(2).to_sparse()]),
    "grad or not": ([torch.ones(2, requires_grad=True)], [torch.ones(2)]),
    "a run and a tuple": (lt.Run((1, 2)), (1, 2)),
    "nobody": ([], []),
}
UNLIKE = {
    "a number": ([1.0, 2.0], [1.0, 2.5], "the runs differ on rank 1 of 2:\n  rank 1: 2.0 in the first, 2.5 in the second, by 0.5"),
    "within": ([{"loss": [0, torch.zeros(2)]}], [{"loss": [0, torch.tensor([0.0, 0.25])]}],
        ("the runs differ on rank 0 of 1:\n  rank 0, ['loss'][1]: f32[2] [0.0, 0.0] in the first, f32[2] [0.0, 0.25] "
         "in the second, in 1 of 2 elements, by up to 0.25")),
    "a long tensor": (
        [torch.zeros(3, 4)], [torch.zeros(3, 4).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(-2.0))],
        ("the runs differ on rank 0 of 1:\n  rank 0: f32[3,4] [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]... in the first, "
         "f32[3,4] [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]... in the second, in 1 of 12 elements, by up to 2; farthest at "
         "[2, 1]: 0.0 and -2.0")),
    "a dtype": ([torch.ones(1)], [torch.ones(1, dtype=torch.float64)],
        "the runs differ on rank 0 of 1:\n  rank 0: f32[1] [1.0] in the first, f64[1] [1.0] in the second"),
    "a shape": ([torch.ones(1)], [torch.ones(1, 1)],
        "the runs differ on rank 0 of 1:\n  rank 0: f32[1] [1.0] in the first, f32[1,1] [[1.0]] in the second"),
    "a kind": ([1], [True], "the runs differ on rank 0 of 1:\n  rank 0: 1 in the first, True in the second"),
    "a key": ([{"a": 1}], [{"b": 1}],
        "the runs differ on rank 0 of 1:\n  rank 0: {'a': 1} in the first, {'b': 1} in the second"),
    "many": ([list(range(14))], [[-1] * 14],
        "the runs differ on rank 0 of 1:\n"
        + "".join(f"  rank 0, [{i}]: {i} in the first, -1 in the second\n" for i in range(12))
        + "  and 2 differences more"),
    "ranks": ([1, 2], [1], "the first run has 2 ranks, and the second 1"),
    "no ranks at all": ([1], torch.ones(1), "the second is a Tensor: compare what run returned, or lists by rank"),
    "text": ("ab", ["a", "b"], "the first is a str: compare what run returned, or lists by rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_same_passes(name):
    first, second = SAME[name]
    assert assert_same(first, first if second is None else second) is None


@pytest.mark.parametrize("name", UNLIKE)
def test_a_difference_is_reported_word_for_word(name):
    first, second, message = UNLIKE[name]
    with pytest.raises(AssertionError) as told:
        assert_same(first, second)
    assert str(told.value) == message


def test_a_dtensor_is_compared_by_its_local_part():
    def rows(scale):
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(scale * torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])

    first = lt.run(rows, 1, ranks=2)
    assert_same(first, [torch.tensor([[0.0, 1], [2, 3]]), torch.tensor([[4.0, 5]])])
    with pytest.raises(AssertionError, match=r"^the runs differ on ranks 0, 1 of 2:"):
        assert_same(first, lt.run(rows, 2, ranks=2))


@pytest.mark.parametrize(("first", "second"), [
    ([1.0], [1.0 + 1e-9]), ([torch.ones(2)], [torch.ones(2) + 1e-7]), ([torch.tensor([NAN])], [torch.tensor([NAN])]),
    ([1j], [1j + 1e-9]),
])  # fmt: skip
def test_within_the_tolerance_passes(first, second):
    assert assert_same(first, second, rtol=1e-6, atol=1e-6) is None


@pytest.mark.parametrize(("first", "second"), [
    ([1.0], [1.1]), ([torch.ones(2)], [torch.ones(2).double()]), ([torch.ones(2)], [torch.ones(1, 2)]), ([1], [2]),
    ([torch.tensor([NAN])], [torch.tensor([1.0])]), (["a"], ["b"]), ([torch.ones(1)], [1.0]),
])  # fmt: skip
def test_beyond_the_tolerance_and_other_kinds_do_not(first, second):
    with pytest.raises(AssertionError):
        assert_same(first, second, rtol=1e-3, atol=1e-3)


def test_a_tolerance_below_zero_is_refused():
    with pytest.raises(AssertionError, match=r"^rtol=-1, atol=0: a tolerance is 0 or more$"):
        assert_same([1], [1], rtol=-1)
    with pytest.raises(AssertionError, match=r"^rtol=0, atol=nan: a tolerance is 0 or more$"):
        assert_same([1], [1], atol=float("nan"))


def test_the_package_offers_it():
    assert lt.testing.assert_same is assert_same


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_tensors_of_any_dtype_are_compared_within_a_tolerance(dtype):
    first = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    second = torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    assert_same([first], [second], atol=1)
    with pytest.raises(AssertionError, match="in 1 of 3 elements"):
        assert_same([first], [second], atol=0.5)
