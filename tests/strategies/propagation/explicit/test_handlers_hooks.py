"""Where a guard gets into DTensor: there while somebody has one, and torch's own again afterwards."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, _api
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.utils import _pytree as pytree

from localtensor._util import ambient
from strategies.propagation.explicit.context import no_implicit_communication
from strategies.propagation.explicit.handlers import ARGS_HOOK, LOCAL_HOOK, _needs
from strategies.propagation.overlay.context import overlay_dtensor
from strategies.torch_api import handler_table
from tests.strategies.propagation.explicit.test_redistribution_text import MESH, S0, P, R, laid
from tests.strategies.small_book import REPLICATED

DISPATCHER = DTensor._op_dispatcher
THEIRS, THEIR_LOCAL = getattr(OpDispatcher, ARGS_HOOK), getattr(_api, LOCAL_HOOK)


def torchs_own():
    return (
        ARGS_HOOK not in vars(DISPATCHER)
        and getattr(DISPATCHER, ARGS_HOOK) is THEIRS
        and getattr(_api, LOCAL_HOOK) is THEIR_LOCAL
        and not hasattr(OpDispatcher, handler_table.HANDLERS_ATTRIBUTE)
    )


def test_every_part_of_torch_that_is_used_is_there():
    assert isinstance(vars(OpDispatcher)[ARGS_HOOK], staticmethod)
    assert callable(THEIR_LOCAL) and callable(pytree.tree_leaves)
    assert torchs_own()


def test_the_attributes_are_torchs_own_again_after_an_exception_too():
    found = []

    def program():
        with no_implicit_communication(), no_implicit_communication():
            found.append(torchs_own())
            raise KeyError

    with pytest.raises(KeyError):
        program()
    assert found == [False]
    assert torchs_own()


@pytest.mark.parametrize("mode", [no_implicit_communication(), overlay_dtensor(REPLICATED)])
def test_the_attributes_are_torchs_own_again_where_entering_fails(mode, monkeypatch):
    def fails(on):
        assert not torchs_own()
        raise KeyError(on)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "set_multithreading_enabled", fails)
        with pytest.raises(KeyError):
            mode.__enter__()
    assert torchs_own()
    assert ambient.guard() is ambient.rules() is None
    with mode:
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


def test_with_an_overlay_whichever_ends_first():
    guard, overlay = no_implicit_communication(), overlay_dtensor(REPLICATED)
    guard.__enter__()
    overlay.__enter__()
    guard.__exit__(None, None, None)
    assert hasattr(OpDispatcher, handler_table.HANDLERS_ATTRIBUTE) and ARGS_HOOK not in vars(DISPATCHER)
    assert not torch.autograd.is_multithreading_enabled()
    guard.__enter__()
    overlay.__exit__(None, None, None)
    assert hasattr(OpDispatcher, handler_table.HANDLERS_ATTRIBUTE) and ARGS_HOOK in vars(DISPATCHER)
    guard.__exit__(None, None, None)
    assert torchs_own()
    assert torch.autograd.is_multithreading_enabled()


def test_many_threads_enter_and_leave():
    turn, failed = threading.Barrier(8), []

    def work():
        turn.wait()
        for _ in range(50):
            with no_implicit_communication():
                if torchs_own():
                    failed.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torchs_own()


def test_the_tensors_that_would_move_have_the_names_of_the_schema():
    op = torch.ops.aten._foreach_add_.List
    have = [laid(MESH, R, R), laid(MESH, S0, R), laid(MESH, P, R), laid(MESH, S0, R)]
    want = [laid(MESH, R, R), laid(MESH, S0, R), laid(MESH, R, R), laid(MESH, R, R)]
    leaves, tree = pytree.tree_flatten(([0, 1], [2, 3], 2.0))
    info = SimpleNamespace(args_tree_spec=tree, flat_args_schema=[*have, 2.0])
    needs = _needs(op, info, [(leaf, have[leaf], want[leaf]) for leaf in (2, 3)])
    assert [(need.argument, need.written) for need in needs] == [("other[0]", False), ("other[1]", False)]
    assert [(need.src, need.dst) for need in needs] == list(zip(have[2:], want[2:], strict=True))
    assert len(leaves) == 5
