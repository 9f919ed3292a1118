"""Handlers of DTensor's that communicate by themselves are refused at the first collective; those that do not, run."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import conv2d, cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import localtensor as lt
from localtensor._util import ambient
from strategies.propagation.explicit import handlers
from strategies.propagation.explicit.context import (
    ImplicitCommunicationWarning,
    allow_implicit_communication,
    no_implicit_communication,
)
from strategies.propagation.explicit.handlers import (
    EQUAL,
    REPLICATE_FIRST,
    SIZE_OPS,
    EqualHandler,
    WatchedHandler,
    watched_table,
)
from strategies.propagation.overlay.context import overlay_dtensor
from strategies.torch_api import handler_table
from tests.strategies.small_book import REPLICATED
from tests.tools.plans.explicit_programs import S0, S1, R, laid, said_by

TABLE = DTensor._op_dispatcher._custom_op_handlers
SIN = torch.ops.aten.sin.default


def on_each(fn, ranks=2):
    first, *others = lt.run(fn, ranks=ranks)
    assert all(other == first for other in others)
    return first


def test_every_part_of_torch_that_is_used_is_there():
    assert issubclass(TorchDispatchMode, object) and callable(c10d._resolve_process_group)
    assert set(SIZE_OPS) <= set(TABLE)
    assert {op for op in TABLE if str(op) in REPLICATE_FIRST} == {
        torch.ops.aten.argmax.default,
        torch.ops.aten.argmin.default,
        torch.ops.aten.convolution.default,
    }


@pytest.mark.parametrize("entered", ["before", "inside"])
def test_loss_parallel_is_refused_wherever_it_was_entered(entered):
    def program():
        logits, labels = laid(S1), distribute_tensor(torch.arange(4), init_device_mesh("cpu", (2,)), [R])
        if entered == "before":
            with loss_parallel():
                return said_by(cross_entropy, logits, labels)
        with no_implicit_communication(), loss_parallel(), pytest.raises(RuntimeError) as caught:
            cross_entropy(logits, labels)
        assert _table() == before
        return str(caught.value)

    before = _table()
    said = on_each(program)
    assert said.startswith("aten._log_softmax.default (test_handlers.py:" if entered == "inside" else "aten._log")
    assert "DTensor's own code for this op calls _c10d_functional.all_reduce.default of f32[4,1]" in said
    assert said.endswith(". Put it in `with allow_implicit_communication():`.")
    assert _table() == before


def _table():
    return list(handler_table.torch_handlers())


COLLECTIVES = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "broadcast": lambda x, group: dist.broadcast(x, group_src=0, group=group),
    "functional": lambda x, group: functional.all_reduce(x, "sum", group),
    "all_to_all": lambda x, group: dist.all_to_all_single(torch.empty_like(x), x, group=group),
    "send": lambda x, group: [
        work.wait()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, 1 - dist.get_rank(), group),
                dist.P2POp(dist.irecv, torch.empty_like(x), 1 - dist.get_rank(), group),
            ]
        )
    ],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_any_collective_of_more_than_one_rank_is_seen(name):
    def program():
        def handler(op, args, kwargs):
            COLLECTIVES[name](torch.ones(2), group)
            return args[0]

        alone = init_device_mesh("cpu", (2, 1)).get_group(1)
        x = laid(S0)
        DTensor._op_dispatcher._custom_op_handlers[SIN] = handler
        try:
            group = dist.group.WORLD
            said = said_by(x.sin)
            group = alone
            return said, said_by(x.sin) if name != "send" else None
        finally:
            del DTensor._op_dispatcher._custom_op_handlers[SIN]

    said, none = on_each(program)
    assert said.startswith("aten.sin.default (explicit_programs.py:") and " of f32[2]" in said
    assert none is None


def test_equal_is_passed_on_in_a_hole_and_on_one_rank():
    def program():
        x = laid(S0)
        with no_implicit_communication(), allow_implicit_communication():
            return torch.equal(x, x)

    def alone():
        x = laid(S0)
        with no_implicit_communication():
            return torch.equal(x, x), torch.equal(x, x * 2), ambient.guard().handlers

    assert on_each(program)
    assert on_each(alone, ranks=1) == (True, False, True)


def test_equal_asks_the_inner_guard_alone():
    def program():
        x = laid(S0)
        with no_implicit_communication(), no_implicit_communication(warn=True):
            return torch.equal(x, x)

    with pytest.warns(ImplicitCommunicationWarning, match="all-reduces one integer"):
        assert on_each(program)


def test_what_only_looks_at_sizes_and_what_an_overlay_has_stays_as_it_is():
    with overlay_dtensor(REPLICATED):
        seen = watched_table(DTensor._op_dispatcher._custom_op_handlers, lambda error: None)
        ours = [op for op, handler in seen.items() if type(handler) is handler_table.OverlayHandler]
        assert len(ours) == len(list(REPLICATED))
        assert type(seen[torch.ops.aten.argmax.default]) is WatchedHandler or torch.ops.aten.argmax.default in ours
        assert type(seen[EQUAL]) in (EqualHandler, handler_table.OverlayHandler)
        assert all(seen[op] is TABLE[op] for op in SIZE_OPS)
        assert seen.table is TABLE


def test_a_handler_of_ours_never_gets_into_torchs_table():
    with no_implicit_communication():
        DTensor._op_dispatcher._custom_op_handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
        assert not any(
            isinstance(handler, handler_table.OverlayHandler) for handler in handler_table.torch_handlers().values()
        )
        DTensor._op_dispatcher._custom_op_handlers = TABLE
    assert DTensor._op_dispatcher._custom_op_handlers is TABLE


def test_a_handler_without_collectives_runs():
    def program():
        mesh = init_device_mesh("cpu", (2,))
        x, w = (distribute_tensor(torch.ones(2, 3, 8, 8), mesh, [p]) for p in (Shard(0), Replicate()))
        return said_by(lambda: laid(S0).argmax(1)), said_by(lambda: conv2d(x, w, padding=1))

    assert on_each(program) == (None, None)


def test_a_collective_whose_group_no_one_can_name_is_taken_for_one_that_communicates():
    bare = SimpleNamespace(namespace="c10d", _schema=SimpleNamespace(name="c10d::barrier_of_all", arguments=[]))
    assert handlers._communicates(bare, (), {})
    waits = SimpleNamespace(namespace="c10d", _schema=SimpleNamespace(name="c10d::wait_tensor", arguments=[]))
    assert not handlers._communicates(waits, (), {})
