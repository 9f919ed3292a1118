"""What one rank's call raises is of the type that torch raises, so that `except` clauses of programs catch it."""

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import MessageMismatch, Refusal


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


CALLS = {
    "broadcast from no rank": lambda: dist.broadcast(ones(2), 7),
    "reduce to no rank": lambda: dist.reduce(ones(2), 7),
    "a dtype that is not carried": lambda: dist.all_reduce(ones(2, dtype=torch.int16)),
    "a dtype that is not reduced": lambda: dist.all_reduce(ones(2), dist.ReduceOp.BAND),
    "too many outputs": lambda: dist.all_gather([ones(2)] * 3, ones(2)),
    "strides": lambda: dist.send(ones(4, 4).t()[1:], 1 - dist.get_rank()),
    "a negative tag": lambda: dist.isend(ones(2), 1 - dist.get_rank(), tag=-3),
    "to itself": lambda: dist.send(ones(2), dist.get_rank()),
    "ranks outside of the world": lambda: dist.new_group([0, 5]),
    "a maximum of complex numbers": lambda: dist.all_reduce(ones(2, dtype=torch.complex64), dist.ReduceOp.MAX),
}
BUILT_IN = (ValueError, TypeError, NotImplementedError, RuntimeError)


def raised(name):
    """The built-in types that the call's error is an instance of, and whether the sentence is ours."""
    try:
        CALLS[name]()
    except Exception as error:
        return {kind.__name__ for kind in BUILT_IN if isinstance(error, kind)}, isinstance(error, Refusal)
    return set(), False


def all_raised():
    return [raised(name) for name in CALLS]


def test_what_a_call_raises_is_of_the_type_that_torch_raises_on_gloo():
    threads, gloo = lt.run(all_raised, ranks=2).values, lt.run(all_raised, ranks=2, on="gloo").values
    for mine, theirs in zip(threads, gloo, strict=True):
        assert [
            name
            for name, (ours, _), (kinds, _) in zip(CALLS, mine, theirs, strict=True)
            if not kinds or not kinds <= ours
        ] == []
    assert [ours for _, ours in threads[0]].count(
        True
    ) == 7  # the others are torch's own, raised before the call is ours


def one_element(sent, received):
    x = torch.arange(6.0)[: torch.Size(sent).numel()].reshape(sent)
    if dist.get_rank():
        target = torch.zeros(received)
        dist.recv(target, 0)
        return target.tolist()
    dist.send(x + 1, 1)
    return x.add(1).reshape(received).tolist()


@pytest.mark.parametrize(("sent", "received"), [((), (1,)), ((1,), ()), ((2, 3), (3, 2)), ((0,), (2, 0))])
def test_a_message_is_its_elements_and_not_its_shape(sent, received):
    for on in ("threads", "gloo"):
        first, second = lt.run(one_element, sent, received, ranks=2, on=on).values
        assert first == second


def of_other_size(dtype, count):
    dist.recv(torch.zeros(count, dtype=dtype), 0) if dist.get_rank() else dist.send(torch.ones(2), 1)


@pytest.mark.parametrize(("dtype", "count"), [(torch.int32, 2), (torch.float32, 3), (torch.float64, 1)])
def test_a_message_of_another_dtype_or_size_is_reported(dtype, count):
    with pytest.raises(MessageMismatch):
        lt.run(of_other_size, dtype, count, ranks=2)
