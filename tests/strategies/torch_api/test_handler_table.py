"""The table that DTensor's dispatcher looks ops up in: torch's own, and what a thread with an overlay sees."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher

from strategies.propagation.overlay.context import overlay_dtensor
from strategies.torch_api import handler_table
from tests.strategies.small_book import REPLICATED, nothing

SCAN, SIN = torch.ops.aten.cumsum.default, torch.ops.aten.sin.default
DISPATCHER = DTensor._op_dispatcher


def test_every_part_of_torch_that_is_used_is_there():
    assert type(DISPATCHER) is OpDispatcher
    assert type(vars(DISPATCHER)[handler_table.HANDLERS_ATTRIBUTE]) is dict
    assert isinstance(torch.autograd.set_multithreading_enabled(True), torch.autograd.set_multithreading_enabled)


def test_the_attribute_is_torchs_own_dict_again():
    mine = DISPATCHER._custom_op_handlers
    with overlay_dtensor(REPLICATED):
        assert DISPATCHER._custom_op_handlers is not mine and SCAN in DISPATCHER._custom_op_handlers
        assert handler_table.torch_handlers() is mine and SCAN not in mine
    assert DISPATCHER._custom_op_handlers is mine
    assert not hasattr(OpDispatcher, handler_table.HANDLERS_ATTRIBUTE)


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.update({SIN: nothing}),
        lambda table: table.__setitem__(SIN, nothing),
        lambda table: table.setdefault(SIN, nothing),
    ],
)
def test_who_writes_to_what_is_seen_writes_to_torchs_own(write):
    mine = DISPATCHER._custom_op_handlers
    before = dict(mine)
    with overlay_dtensor(REPLICATED):
        write(DISPATCHER._custom_op_handlers)
        assert DISPATCHER._custom_op_handlers[SIN] is nothing is mine[SIN]
        assert DISPATCHER._custom_op_handlers.pop(SIN) is nothing
        assert SIN not in DISPATCHER._custom_op_handlers
        DISPATCHER._custom_op_handlers[SIN] = nothing
        del DISPATCHER._custom_op_handlers[SIN]
        assert DISPATCHER._custom_op_handlers.copy() == before
    assert mine == before


def test_what_is_put_back_is_the_very_object_that_was_there():
    mine = DISPATCHER._custom_op_handlers
    with overlay_dtensor(REPLICATED):
        DISPATCHER._custom_op_handlers = DISPATCHER._custom_op_handlers
        assert handler_table.torch_handlers() is mine
        other = {SIN: nothing}
        DISPATCHER._custom_op_handlers = other
        assert handler_table.torch_handlers() is other and SCAN in DISPATCHER._custom_op_handlers
        DISPATCHER._custom_op_handlers = mine
    assert DISPATCHER._custom_op_handlers is mine
