import numpy as np
import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.collectives.compare import difference_text, same_bits
from localtensor.errors import EarlyReturn, KindMismatch, RanksDisagree

same = lt.assert_same_on_all_ranks
NAN = float("nan")


class Named:
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return self.name == other.name

    __hash__ = None


ALIKE = {
    "tensors": lambda: torch.arange(6).reshape(2, 3),
    "not a number": lambda: {"loss": [torch.tensor([NAN, 1.0]), NAN]},
    "a module": lambda: torch.nn.Linear(2, 2),
    "nothing": lambda: None,
    "text": lambda: ("a", 1, 2.5, b"x", {"k": (True,)}),
    "an object": lambda: Named("a"),
    "empty": lambda: [torch.zeros(0, 3), [], {}],
    "an array": lambda: {"a": np.array([[1.0, NAN]]), "b": np.array(["x"]), "c": np.float32(2)},
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "eight bits": lambda: torch.tensor([1.5, NAN]).to(torch.float8_e4m3fn),
    "without a gradient here": lambda: torch.ones(2).requires_grad_(dist.get_rank() == 0),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1"])
def test_what_is_the_same_passes(name, schedule):
    assert lt.run(lambda: same(ALIKE[name]()), ranks=3, schedule=schedule).values == (None,) * 3


def rank():
    return dist.get_rank()


DIFFER = {
    "a tensor": (lambda: torch.tensor([1.0, 2.0 + rank() % 2]),
        "value: f32[2] [1.0, 3.0] on rank 1, f32[2] [1.0, 2.0] on ranks 0, 2: "),
    "in a container": (lambda: {"a": [0, torch.tensor(rank() % 2)]}, "value['a'][1]"),
    "a dtype": (lambda: torch.zeros(1, dtype=torch.float64 if rank() % 2 else torch.float32), "f64[1] [0.0]"),
    "a shape": (lambda: torch.zeros(1 + rank() % 2), "f32[2] [0.0, 0.0]"),
    "a kind": (lambda: 1 if rank() % 2 else 1.0, "value"),
    "a key": (lambda: {"a" if rank() % 2 else "b": 1}, "value"),
    "a length": (lambda: [0] * (1 + rank() % 2), "value"),
    "a parameter": (lambda: torch.nn.Linear(1, 1) if rank() % 2 else torch.nn.Linear(1, 1, bias=False), "value"),
    "an object": (lambda: Named(rank() % 2), "value"),
    "a number": (lambda: rank() % 2, "value"),
    "an array": (lambda: np.arange(2) + rank() % 2, "value: array([1, 2]) on rank 1, array([0, 1]) on ranks 0, 2"),
    "the shape of an array": (lambda: np.zeros(1 + rank() % 2), "value"),
    "a sparse tensor": (lambda: torch.diag(torch.ones(2) + rank() % 2).to_sparse(sparse_dim=2),
        "in 2 of 4 elements, by up to 1"),
    "eight bits": (lambda: torch.ones(1).mul(1 + rank() % 2).to(torch.float8_e4m3fn), "by up to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFER)
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1"])
def test_what_differs_is_reported(name, schedule):
    make, told = DIFFER[name]

    def program():
        same(make())

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(RanksDisagree) as caught:
        lt.run(program, ranks=3, schedule=schedule)
    assert told in str(caught.value)
    assert set(caught.value.values) == {0, 1, 2} and {place.line for place in caught.value.places} == {line}


def test_the_whole_message():
    def program():
        same({"w": torch.tensor([1.0, 2.0 + (rank() == 1) / 2])}, "weights")

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(RanksDisagree) as caught:
        lt.run(program, ranks=3)
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "assert_same_on_all_ranks: weights['w']: f32[2] [1.0, 2.5] on rank 1, f32[2] [1.0, 2.0] on ranks 0, 2: "
        "the ranks disagree, rank 1 from rank 0 in 1 of 2 elements, by up to 0.5. "
        "Compute it from what all ranks share: the same seed, the same input, or a broadcast from one rank."
    )
    assert rest == [
        "Likely culprit: rank 1; ranks 0, 2 agree.",
        f"  rank 1: f32[2] [1.0, 2.5] at test_compare.py:{line} in program",
        f"  ranks 0, 2: f32[2] [1.0, 2.0] at test_compare.py:{line} in program",
    ]


def test_a_rank_that_does_not_ask_is_missed_as_in_a_barrier():
    with pytest.raises(EarlyReturn):
        lt.run(lambda: same(1) if rank() else None, ranks=2)
    with pytest.raises(KindMismatch):
        lt.run(lambda: same(1) if rank() else dist.barrier(), ranks=2)


def test_only_the_group_is_asked():
    def program():
        pair = dist.new_group([0, 2])
        if rank() != 1:
            same(rank() * 0, group=pair)
        dist.destroy_process_group(pair)
        return rank()

    assert lt.run(program, ranks=3).values == (0, 1, 2)


def test_what_was_compared_is_the_value_at_the_call():
    def program():
        x = torch.zeros(2)
        same(x)
        x += rank()
        return x.tolist()

    assert lt.run(program, ranks=2, schedule="shuffled:3").values == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_halves_are_compared():
    one, other = torch.tensor([1j, NAN]).to(torch.complex32), torch.tensor([2j, NAN]).to(torch.complex32)
    assert same_bits(one, one.clone())
    assert not same_bits(one, other)
    assert difference_text(one, other) == "in 1 of 2 elements"
