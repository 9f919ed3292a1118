"""Overlays: what is inside is inside, whoever enters, nests, raises or runs ranks."""

import asyncio
import concurrent.futures
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.parallel import loss_parallel

import localtensor as lt
from localtensor._util import ambient
from strategies.ops.semantics.rule_registry import OpRule, RuleRegistry, rules
from strategies.propagation.overlay.context import BadOverlay, overlay_dtensor
from strategies.torch_api import handler_table
from tests.strategies.small_book import REPLICATED, RIGHT, WRONG, nothing
from tests.tools import warm

X = torch.arange(12.0).reshape(4, 3) + 1
S0, S1, R = [Shard(0)], [Shard(1)], [Replicate()]
cumsum = torch.ops.aten.cumsum.default
ATEN = torch.ops.aten


@pytest.fixture
def mesh():
    with lt.LocalTensorMode(2):
        yield init_device_mesh("cpu", (2,))


def rows_of(mesh, x=X, placements=S0):
    return distribute_tensor(x, mesh, placements)


def goes(mesh, dim=0):
    """The placements of a scan along the rows, which tell whose rule was asked."""
    return list(rows_of(mesh).cumsum(dim).placements)


def assert_untouched():
    assert "_custom_op_handlers" not in vars(OpDispatcher)
    assert not any(
        isinstance(h, handler_table.OverlayHandler) for h in DTensor._op_dispatcher._custom_op_handlers.values()
    )
    assert ambient.own_rules() is None


# -- scopes


def test_rules_hold_inside_and_are_gone_outside(mesh):
    before = goes(mesh)
    with overlay_dtensor(WRONG) as there:
        assert there.ops == ("aten.cumsum.default",)
        assert goes(mesh) == S0
        assert not torch.equal(rows_of(mesh).cumsum(0).full_tensor().reconcile(), X.cumsum(0))
    assert goes(mesh) == before != S0
    assert_untouched()


def test_rules_are_gone_after_an_exception(mesh):
    with pytest.raises(ZeroDivisionError), overlay_dtensor(WRONG):
        _ = 1 / 0
    assert goes(mesh) != S0
    assert_untouched()


def test_the_same_call_before_inside_and_after_is_never_answered_from_the_memory_of_another(mesh):
    x = rows_of(mesh)
    seen = []
    for _ in range(3):
        seen.append(list(x.cumsum(0).placements))
        with overlay_dtensor(WRONG):
            seen.append(list(x.cumsum(0).placements))
    assert seen == [seen[0], S0] * 3 and seen[0] != S0


def test_the_inner_overlay_goes_first_and_the_outer_one_comes_back(mesh):
    with overlay_dtensor(WRONG):
        with overlay_dtensor(REPLICATED):
            assert goes(mesh) == R
            with overlay_dtensor(WRONG):
                assert goes(mesh) == S0
            assert goes(mesh) == R
        assert goes(mesh) == S0
    assert_untouched()


def test_the_inner_overlay_keeps_the_rules_of_the_outer_one_that_it_lacks(mesh):
    with overlay_dtensor(REPLICATED), overlay_dtensor(RIGHT, only=["aten.exp.default"]):
        assert goes(mesh) == R


def test_one_overlay_can_be_entered_again_inside_itself_and_later(mesh):
    ours = overlay_dtensor(WRONG)
    for _ in range(2):
        with ours:
            with ours:
                assert goes(mesh) == S0
            assert goes(mesh) == S0
        assert goes(mesh) != S0
    assert_untouched()


def test_overlays_left_in_another_order_leave_nothing(mesh):
    first, second = overlay_dtensor(WRONG), overlay_dtensor(REPLICATED)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert goes(mesh) == R
    second.__exit__(None, None, None)
    assert goes(mesh) != S0
    assert_untouched()


def test_other_ops_go_their_own_way(mesh):
    with overlay_dtensor(REPLICATED):
        assert rows_of(mesh).exp().placements == (Shard(0),)


# -- which rules


def test_only_takes_what_it_names(mesh):
    assert overlay_dtensor(RIGHT, only=["aten.cumsum.*"]).ops == ("aten.cumsum.default", "aten.cumsum.out")
    assert overlay_dtensor(RIGHT, only=[cumsum]).ops == ("aten.cumsum.default",)


def test_what_dtensor_has_is_replaced_and_what_it_lacks_is_added_only_if_asked():
    lacking = rules("none", "DTensor has none", ["aten._linalg_slogdet.default", "aten._segment_reduce_backward.default"],
                    nothing)  # fmt: skip
    unknown = [e for e in lacking if e.op == "aten._segment_reduce_backward.default"]
    book = RuleRegistry.of(*unknown, *REPLICATED)
    assert overlay_dtensor(book, add=False).ops == ("aten.cumsum.default",)
    assert overlay_dtensor(book, replace=False).ops == ("aten._segment_reduce_backward.default",)
    assert len(overlay_dtensor(book).ops) == 2


def test_overlays_may_end_in_any_order_and_the_backward_is_as_it_was():
    first, second = overlay_dtensor(REPLICATED), overlay_dtensor(REPLICATED)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.autograd.is_multithreading_enabled()
    second.__exit__(None, None, None)
    assert torch.autograd.is_multithreading_enabled()


# -- threads and tasks


def test_threads_see_their_own_overlays_only(mesh):
    del mesh  # a mode is this thread's: the others ask what their handlers are
    inside, go_on = threading.Event(), threading.Event()
    seen = {}

    def handler(name):
        seen[name] = isinstance(DTensor._op_dispatcher._custom_op_handlers.get(cumsum), handler_table.OverlayHandler)

    def enters():
        with overlay_dtensor(WRONG):
            handler("inside")
            inside.set()
            go_on.wait(20)
            handler("still inside")
        handler("after")

    def stays_out():
        inside.wait(20)
        handler("outside")
        go_on.set()

    threads = [threading.Thread(target=f) for f in (enters, stays_out)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {"inside": True, "still inside": True, "outside": False, "after": False}
    assert_untouched()


def in_a_thread(overlaid, turns, barrier):
    """On a fake group of one thread: what a scan is given, each time."""
    mesh = DeviceMeshOf2.mesh
    x = DTensor.from_local(torch.ones(2, 3), mesh, S0, run_check=False)
    barrier.wait(20)
    seen = set()
    for _ in range(turns):
        if overlaid:
            with overlay_dtensor(WRONG):
                seen.add(tuple(cumsum(x, 0).placements))
        else:
            seen.add(tuple(cumsum(x, 1).placements))
            seen.add(tuple(DTensor.from_local(torch.ones(2, 3), mesh, S1, run_check=False).cumsum(0).placements))
    return seen


class DeviceMeshOf2:
    mesh = None


@pytest.fixture
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    DeviceMeshOf2.mesh = init_device_mesh("cpu", (2,))
    yield
    DeviceMeshOf2.mesh = None
    dist.destroy_process_group()


def test_two_threads_one_inside_and_one_outside_are_both_right_two_hundred_times(fake_group):
    barrier = threading.Barrier(4)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(in_a_thread, i % 2 == 0, 50, barrier) for i in range(4)]
        seen = [f.result(60) for f in found]
    assert seen == [{(Shard(0),)}, {(Shard(0),), (Shard(1),)}] * 2
    assert_untouched()


def test_tasks_of_one_thread_see_their_own_overlays_only(fake_group):
    x = DTensor.from_local(torch.ones(2, 3), DeviceMeshOf2.mesh, S0, run_check=False)

    async def inside(turn):
        with overlay_dtensor(WRONG):
            turn.set()
            await asyncio.sleep(0)
            return cumsum(x, 0).placements

    async def outside(turn):
        await turn.wait()
        return cumsum(x, 0).placements

    async def both():
        turn = asyncio.Event()
        return await asyncio.gather(inside(turn), outside(turn))

    here, there = asyncio.run(both())
    assert here == (Shard(0),) and there != here


# -- ranks


def scan_on_ranks():
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(X, mesh, [Shard(0), Shard(1)])
    return x.cumsum(0).placements, x.cumsum(0).full_tensor()


def test_an_overlay_around_a_run_holds_on_all_ranks():
    with overlay_dtensor(REPLICATED):
        values = lt.run(scan_on_ranks, ranks=4).values
    assert all(placements == (Replicate(), Replicate()) for placements, _ in values)
    assert all(torch.equal(whole, X.cumsum(0)) for _, whole in values)
    assert lt.run(scan_on_ranks, ranks=4).values[0][0] != (Replicate(), Replicate())
    assert_untouched()


@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:3"])
def test_an_overlay_inside_a_rank_program_is_that_ranks_own(schedule):
    def one_each():
        with overlay_dtensor(REPLICATED if dist.get_rank() else RIGHT):
            dist.barrier()
            handlers = DTensor._op_dispatcher._custom_op_handlers
            dist.barrier()
            return len([h for h in handlers.values() if isinstance(h, handler_table.OverlayHandler)])

    assert lt.run(one_each, ranks=3, schedule=schedule).values == (len(RIGHT), 1, 1)
    assert_untouched()


def test_all_ranks_may_enter_the_same_book():
    def inside():
        with overlay_dtensor(RIGHT):
            mine = scan_on_ranks()
        return mine, scan_on_ranks()[0]

    values = lt.run(inside, ranks=4).values
    assert all(torch.equal(whole, X.cumsum(0)) for (_, whole), _ in values)
    assert {placements for (placements, _), _ in values} == {(Replicate(), Shard(1))}


def test_lockstep_gives_what_rank_threads_give():
    with overlay_dtensor(RIGHT):
        threads = lt.run(scan_on_ranks, ranks=4).values
        with lt.LocalTensorMode(4):
            placements, whole = scan_on_ranks()
    assert placements == threads[0][0]
    assert torch.equal(whole.reconcile(), threads[0][1])


def test_the_backward_goes_by_the_rules_too(mesh):
    with overlay_dtensor(RIGHT) as there:
        x = rows_of(mesh).requires_grad_()
        before = len(there.plans)
        x.exp().backward(rows_of(mesh, torch.ones(4, 3)))
        assert len(there.plans) > before + 1  # exp, and the product in its backward
        assert torch.equal(x.grad.full_tensor().reconcile(), X.exp())


def test_a_backward_inside_stays_in_its_thread_and_the_switch_comes_back():
    before = torch._C._is_multithreading_enabled()
    with overlay_dtensor(RIGHT), overlay_dtensor(WRONG):
        assert torch._C._is_multithreading_enabled() is False
    assert torch._C._is_multithreading_enabled() is before


# -- others who write to the same table


def test_handlers_that_torch_sets_inside_go_first_and_are_gone_after(mesh):
    book = RuleRegistry.of(*rules("none", "nothing is known", ["aten._log_softmax.default"], nothing))
    op = ATEN._log_softmax.default
    with overlay_dtensor(book):
        ours = DTensor._op_dispatcher._custom_op_handlers[op]
        with loss_parallel():
            assert DTensor._op_dispatcher._custom_op_handlers[op] is not ours
        assert DTensor._op_dispatcher._custom_op_handlers[op] is ours
    with loss_parallel(), overlay_dtensor(book):
        assert isinstance(DTensor._op_dispatcher._custom_op_handlers[op], handler_table.OverlayHandler)
    assert op not in DTensor._op_dispatcher._custom_op_handlers
    assert_untouched()


def test_a_table_made_from_what_is_seen_inside_brings_nothing_of_ours_outside():
    dispatcher = DTensor._op_dispatcher
    mine = dispatcher._custom_op_handlers
    try:
        with overlay_dtensor(RuleRegistry.of(*rules("none", "nothing", ["aten.argmax.default"], nothing), *REPLICATED)):
            dispatcher._custom_op_handlers = {**dispatcher._custom_op_handlers, ATEN.sin.default: nothing}
        assert dispatcher._custom_op_handlers == {**mine, ATEN.sin.default: nothing}
    finally:
        dispatcher._custom_op_handlers = mine
    assert_untouched()


# -- what is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: overlay_dtensor({}), "overlay_dtensor: book: {}: this is no RuleRegistry. Make one"),
        (lambda: overlay_dtensor(RIGHT, only="aten.add.Tensor"),
            "only: 'aten.add.Tensor': this is one name, and no list"),
        (lambda: overlay_dtensor(RIGHT, only=["aten.ad.Tensor"]),
            "only: 'aten.ad.Tensor': the book has no such overload"),
        (lambda: overlay_dtensor(RuleRegistry.of(OpRule("aten.ad.Tensor", nothing, "f", "r"))),
            "this torch has no such overload"),
        (lambda: overlay_dtensor(REPLICATED, replace=False), "book: 1 rules: none of them is left"),
        (lambda: overlay_dtensor(
                RuleRegistry.of(*rules("f", "r", ["aten.cumsum.default"], nothing, shapes=["size"]))
            ),
            f"small_book.py:{nothing.__code__.co_firstlineno}: shapes=('size',): the op has no such argument. Name some of self, dim, dtype.",
        ),
    ],
)  # fmt: skip
def test_what_is_no_book_of_rules_is_refused_with_its_place(make, said):
    with pytest.raises(BadOverlay) as caught:
        make()
    assert said in str(caught.value)
    assert_untouched()


def test_processes_do_not_see_it():
    code = "from torch.distributed.tensor import DTensor; print(len(DTensor._op_dispatcher._custom_op_handlers))"
    with overlay_dtensor(REPLICATED):
        ran = warm.run([sys.executable, "-c", code], timeout=120, check=True)
        here = len(DTensor._op_dispatcher._custom_op_handlers)
    assert int(ran.stdout) == here - 1 == len(DTensor._op_dispatcher._custom_op_handlers)


def test_partial_values_stay_partial_where_a_rule_says_so(mesh):
    with overlay_dtensor(RIGHT):
        p = DTensor.from_local(X, mesh, [Partial()], run_check=False)
        assert (p + p).placements == (Partial(),)
        assert torch.equal((p + p).full_tensor().reconcile(), 4 * X)
