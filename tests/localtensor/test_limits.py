"""What torch keeps once per process: harmless among rank threads, or refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler

import localtensor as lt
from localtensor import limits
from localtensor.errors import NotServed, RankRaised


def compiled_rank():
    return torch.compile(lambda x: x + dist.get_rank(), backend="eager")(torch.zeros(1)).item()


def gathered_futures():
    x, y = torch.ones(1), torch.full((1,), 2.0)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    futures = torch.futures.collect_all([work.get_future() for work in works]).wait()
    return [future.value()[0].item() for future in futures]


def waited_futures():
    x = torch.ones(1)
    return [one[0].item() for one in torch.futures.wait_all([dist.all_reduce(x, async_op=True).get_future()])]


def everybody_profiles():
    with profiler.profile():
        dist.all_reduce(torch.ones(2))


def rank_one_profiles():
    if dist.get_rank() == 1:
        with profiler.profile() as profile:
            dist.all_reduce(torch.ones(2))
        return len(profile.function_events) > 0
    dist.all_reduce(torch.ones(2))
    return None


def test_a_compiled_function_sees_the_rank_that_calls_it():
    assert lt.run(compiled_rank, ranks=3).values == (0.0, 1.0, 2.0)


def test_compiling_is_as_before_after_a_run():
    compile_before = torch.compile
    lt.run(compiled_rank, ranks=2)
    assert torch.compile is compile_before
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_futures_that_are_collected_are_waited_for():
    assert lt.run(gathered_futures, ranks=2, timeout=20).values == ([2.0, 4.0], [2.0, 4.0])
    assert lt.run(waited_futures, ranks=2, timeout=20).values == ([2.0], [2.0])


@pytest.mark.parametrize("divided", [True, False], ids=["a future of its own", "the future of a collective"])
def test_the_future_of_a_communication_hook_is_waited_for(divided):
    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 2) if divided else future

    def program():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook(None, hook)
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        return model.module.weight.grad.tolist()

    if divided:
        assert lt.run(program, ranks=2, timeout=20).values == ([[1.5, 1.5]],) * 2
    else:  # torch wants a tensor and finds a list, on gloo as well
        with pytest.raises(RankRaised) as caught:
            lt.run(program, ranks=2, timeout=20)
        assert type(caught.value.__cause__) is RuntimeError


def test_one_rank_may_profile():
    assert lt.run(rank_one_profiles, ranks=2).values == (None, True)


def test_a_second_profiler_is_refused_by_name():
    try:
        lt.run(everybody_profiles, ranks=2)
    except RankRaised as refused:
        cause = refused.__cause__
    else:
        cause = None
    assert isinstance(cause, NotServed)
    assert str(cause) == (
        "torch.profiler: on: rank threads: this call is not served there (rank 0 profiles already, and torch has one "
        "profiler per process: let one rank do it). Run the program on real processes, with on='gloo'."
    )


def test_the_profiler_is_as_before_after_a_run():
    before = profiler.profile._start_trace, profiler.profile.__exit__, torch.futures.collect_all
    lt.run(dist.get_rank, ranks=1)
    assert (profiler.profile._start_trace, profiler.profile.__exit__, torch.futures.collect_all) == before


def test_torch_still_has_the_private_parts_that_are_touched():
    from torch._dynamo import eval_frame

    assert set(limits.PRIVATE) == {
        "torch.autograd.profiler.profile._start_trace",
        "torch._dynamo.eval_frame._stance",
        "torch.distributed._register_comm_hook",
    }
    assert hasattr(profiler.profile, "_start_trace") and hasattr(eval_frame, "_stance")
    assert hasattr(dist, "_register_comm_hook")
