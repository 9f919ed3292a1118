"""Lists of tensors that gloo refuses are refused on rank threads as well, and the rest of what gloo takes is served."""

import re

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import RefusedByGloo

ONE, TWO, LONG = torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.int64)
SPARSE = torch.tensor([0.0, 1.0]).to_sparse()


def options(kind, **values):
    made = getattr(dist, kind)()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def calls(rank):
    """Calls of a group of two that gloo refuses on each rank, with some of its words."""
    mine, other = rank, 1 - rank
    broadcast, gather, scatter = "BroadcastOptions", "GatherOptions", "ScatterOptions"
    return [
        ("broadcast", ([ONE], options(broadcast, rootRank=2, rootTensor=0)), "invalid root rank"),
        ("broadcast", ([ONE], options(broadcast, rootRank=mine, rootTensor=1)), "invalid root tensor: 1"),
        ("broadcast", ([], options(broadcast, rootRank=mine, rootTensor=0)), "invalid root tensor: 0"),
        ("broadcast", ([ONE, LONG], options(broadcast, rootRank=mine, rootTensor=0)), "invalid tensor type"),
        ("allreduce", ([], dist.AllreduceOptions()), "requires non-empty tensor list"),
        ("allreduce", ([ONE, TWO], dist.AllreduceOptions()), "invalid tensor size"),
        ("allreduce", ([TWO, SPARSE], dist.AllreduceOptions()), "invalid tensor layout"),
        ("allreduce", ([SPARSE], options("AllreduceOptions", reduceOp=dist.ReduceOp.MAX)), "unsupported reduction operation"),
        ("allreduce_coalesced", ([ONE, LONG], dist.AllreduceCoalescedOptions()), "tensors must all have the same type"),
        ("allreduce_coalesced", ([SPARSE, SPARSE], dist.AllreduceCoalescedOptions()), "unsupported layout"),
        ("reduce", ([ONE, ONE], options("ReduceOptions", rootRank=mine, rootTensor=0)), "requires a single-element tensor list"),
        ("allgather", ([], []), "requires non-empty input tensor list"),
        ("allgather", ([], [ONE]), "requires input/output tensor lists to have the same length"),
        ("allgather", ([[ONE]], [ONE]), "invalid output tensor list at index 0 (expected length 2, got 1)"),
        ("allgather", ([[ONE, TWO]], [ONE]), "invalid tensor size at index 1"),
        ("gather", ([], [ONE, ONE], options(gather, rootRank=0)), "requires a single-element input tensor list"),
        ("gather", ([], [ONE], options(gather, rootRank=mine)), "requires a single-element output list"),
        ("gather", ([[ONE]], [ONE], options(gather, rootRank=mine)), "Incorrect output list size 1. Output list size should be 2"),
        ("gather", ([[ONE] * 2], [ONE], options(gather, rootRank=other)), "requires empty output on non-root"),
        ("scatter", ([], [], options(scatter, rootRank=0)), "requires a single-element output tensor list"),
        ("scatter", ([ONE], [[TWO] * 2], options(scatter, rootRank=mine)), "invalid tensor size"),
        ("scatter", ([ONE], [[ONE] * 2], options(scatter, rootRank=other)), "requires empty input on non-root"),
    ]  # fmt: skip


def refusals(path):
    """The kind of error of each call, and whether its sentence has gloo's words, or all of it where it has not."""
    group = dist.ProcessGroupGloo(dist.FileStore(path, 2), dist.get_rank(), 2)
    found = []
    for name, arguments, words in calls(dist.get_rank()):
        try:
            getattr(group, name)(*arguments)
        except RuntimeError as refused:
            found.append((name, words if words in str(refused) else str(refused)))
    dist.barrier()  # a rank that is done may not take its group away while another one still connects
    return found


WANTED = [(name, words) for name, _, words in calls(0)]


def test_a_group_that_the_program_makes_refuses_with_the_words_of_gloo(tmp_path):
    assert lt.run(refusals, str(tmp_path / "store"), ranks=2).values == (WANTED, WANTED)


def test_those_are_the_words_of_gloo(tmp_path):
    assert lt.run(refusals, str(tmp_path / "store"), ranks=2, on="gloo").values == (WANTED, WANTED)


def several(path):
    """Calls with several tensors on each rank."""
    rank = dist.get_rank()
    group = dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2)
    sums = [torch.tensor([1.0 + 2 * rank + i]) for i in range(2)]
    future = group.allreduce(sums, dist.AllreduceOptions()).get_future()
    future.wait()
    sent = [torch.tensor([10.0 * rank + i]) for i in range(2)]
    group.broadcast(sent, options("BroadcastOptions", rootRank=1, rootTensor=1)).wait()
    inputs = [torch.tensor([100.0 * rank + i]) for i in range(2)]
    outputs = [[torch.zeros(1) for _ in range(4)] for _ in range(2)]
    gathered = group.allgather(outputs, inputs).get_future()
    gathered.wait()
    sparse = [torch.tensor([1.0 + rank, 0.0]).to_sparse(), torch.tensor([0.0, 5.0]).to_sparse()]
    group.allreduce(sparse, dist.AllreduceOptions()).wait()
    return (
        [x.tolist() for x in future.value()],
        [x.tolist() for x in sent],
        [[x.tolist() for x in each] for each in gathered.value()],
        [x.to_dense().tolist() for x in sparse],
    )


def test_several_tensors_of_a_rank_are_reduced_sent_and_gathered_as_on_gloo(tmp_path):
    ours = lt.run(several, str(tmp_path / "ours"), ranks=2).values
    assert ours == lt.run(several, str(tmp_path / "gloo"), ranks=2, on="gloo").values
    assert ours[0][0] == [[10.0], [10.0]] and ours[0][1] == [[11.0], [11.0]]


def after_a_barrier(path):
    group = dist.ProcessGroupGloo(dist.FileStore(path, 2), dist.get_rank(), 2)
    tensors = [torch.full((100,), float(i)) for i in range(4)]
    for tensor in tensors:
        group.allreduce(tensor)  # no wait
    group.barrier().wait()
    return [float(tensor.sum()) for tensor in tensors]


def test_a_barrier_waits_for_the_earlier_calls_of_its_group(tmp_path):
    assert lt.run(after_a_barrier, str(tmp_path / "ours"), ranks=2).values == ([0.0, 200.0, 400.0, 600.0],) * 2


def test_a_barrier_of_another_group_does_not():
    def program():
        other, tensor = dist.new_group(), torch.ones(4)
        dist.barrier(other)
        dist.all_reduce(tensor, async_op=True)
        dist.barrier(other)
        return float(tensor.sum())

    with pytest.raises(lt.errors.ReadBeforeWait):
        lt.run(program, ranks=2)


def test_the_sentence_names_the_call_and_what_to_do():
    def program():
        with pytest.raises(
            RefusedByGloo, match=re.escape("all_gather: outputs: 1 tensors: invalid output tensor list at index 0")
        ) as refused:
            dist.group.WORLD.allgather([[ONE]], [ONE])
        return str(refused.value)

    assert lt.run(program, ranks=2).values[1].endswith("(expected length 2, got 1). Let rank 1 bring a list of 2.")
