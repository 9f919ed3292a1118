import asyncio
from types import SimpleNamespace

import pytest

from localtensor._util.events import Call, Place
from localtensor.concurrency.schedule import round_robin
from localtensor.errors import KindMismatch, RankRaised
from localtensor.pytest_plugin.fixtures import DeferredFixture
from localtensor.pytest_plugin.marks import RankPlan
from localtensor.pytest_plugin.rank_body import RankBody, RankEventLoop
from localtensor.threads.run import run_in_threads

pytest_plugins = ["pytester"]


def program(function, ranks=2):
    item = SimpleNamespace(instance=None, fixturenames=[], funcargs={})
    return RankBody(item, RankPlan(ranks, (ranks,)), function, (), {})


def test_a_rank_returns_what_the_body_returns_and_awaits_what_is_to_be_awaited():
    async def later():
        return "awaited"

    assert run_in_threads(program(lambda: 5).run_rank, 2, round_robin(), 0, 60).values == (5, 5)
    assert run_in_threads(program(later).run_rank, 2, round_robin(), 0, 60).values == ("awaited", "awaited")


def test_a_body_that_failed_before_its_fixtures_ended_the_run_is_the_cause():
    made = program(lambda: None, 3)
    calls = [Call(rank, kind, "0", (0, 1, 2), 0, place=Place("t.py", 7 + rank, "f")) for rank, kind in enumerate("abc")]
    fault = KindMismatch(calls, ())
    fault.log = tuple(calls)
    assert made.cause_of(fault) is fault
    made.failed[0] = AssertionError("words")
    made.done.add(2)
    cause = made.cause_of(fault)
    assert isinstance(cause, RankRaised) and cause.errors == {0: made.failed[0]} and cause.log == fault.log
    assert [(one.rank, one.where) for one in cause.busy] == [(1, "t.py:8 in f")]
    assert made.cause_of(cause) is cause


def test_what_a_teardown_raises_is_noted_on_the_failure_of_the_body():
    def fixture():
        yield 3
        raise KeyError("teardown")

    def body():
        raise ValueError("body")

    made = program(body, 1)
    definition = SimpleNamespace(func=fixture, argname="mine")
    made.item.fixturenames, made.item.funcargs = ["mine"], {"mine": DeferredFixture(definition, {})}
    with pytest.raises(RankRaised) as caught:
        run_in_threads(made.run_rank, 1, round_robin(), 0, 60)
    error = caught.value.errors[0]
    assert str(error) == "body"
    assert getattr(error, "__notes__", []) == ["and while the fixtures were torn down: KeyError: 'teardown'"]


def test_tensors_and_models_that_are_set_up_once_are_each_ranks_own(tried):
    tried(
        """
        @pytest.fixture(scope="module")
        def model():
            return torch.nn.Linear(2, 1)

        @pytest.fixture(scope="module")
        def optimizer(model):
            return torch.optim.SGD(model.parameters(), lr=1.0)

        @pytest.fixture(scope="module")
        def kept():
            return []

        @pytest.mark.ranks(2, schedules=2)
        def test_one_step(model, optimizer, rank, kept):
            before = model.weight.detach().clone()
            model(torch.full((2,), rank + 1.0)).backward()
            dist.barrier()
            assert model.weight.grad.tolist() == [[rank + 1.0] * 2]
            optimizer.step()
            assert not torch.equal(model.weight, before)
            kept.append((rank, before))

        def test_afterwards(model, kept):
            assert model.weight.grad is None
            assert sorted(rank for rank, _ in kept) == [0, 0, 1, 1]
            assert all(torch.equal(model.weight, before) for _, before in kept)

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("x", [torch.ones(2)])
        @pytest.mark.parametrize("many", [("a", torch.ones(2))])
        def test_parameters(x, many, rank):
            for one in (x, many[1]):
                one += rank
                dist.barrier()
                assert one.tolist() == [rank + 1.0] * 2

        class TestMethods:
            def setup_method(self):
                self.x = torch.ones(2)

            @pytest.mark.ranks(3)
            def test_own(self, rank):
                self.x += rank
                dist.all_reduce(self.x)
                assert self.x.tolist() == [6, 6]

        @pytest.fixture
        def middle():
            return torch.ones(2, requires_grad=True) * 2

        @pytest.mark.ranks(2)
        def test_what_cannot_be_copied(middle):
            assert middle.tolist() == [2, 2]
        """
    ).assert_outcomes(passed=5)


async def loop_and(value):
    return asyncio.get_running_loop(), value


def test_all_that_a_rank_awaits_runs_on_one_loop():
    loop = RankEventLoop()
    first, second = loop.run(loop_and(1)), loop.run(loop_and(2))
    assert first[0] is second[0] and (first[1], second[1]) == (1, 2)
    loop.close()
    assert first[0].is_closed()


def test_tasks_that_are_left_are_cancelled():
    async def leave():
        return asyncio.create_task(asyncio.sleep(5))

    loop = RankEventLoop()
    left = loop.run(leave())
    loop.close()
    assert left.cancelled()


def test_a_loop_that_no_one_used_is_none():
    loop = RankEventLoop()
    loop.close()
    assert loop._loop is None
