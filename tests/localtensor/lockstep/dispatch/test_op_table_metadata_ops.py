"""Ops that give a tensor another shape or another memory, in place."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localtensor.errors import NotInLockstep
from localtensor.lockstep.dispatch.op_table import VIEW_OPS
from localtensor.lockstep.mode import rank_map

pytestmark = pytest.mark.usefixtures("mode")

CHANGES = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapdims_": lambda x: x.swapdims_(0, -1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_ one": lambda x: x.unsqueeze_(0).squeeze_(0),
    "squeeze_ two": lambda x: torch.ops.aten.squeeze_.dims(x.unsqueeze_(0).unsqueeze_(-1), [0, -1]),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 2), 1),
    "resize_": lambda x: x.resize_(2, 2),
    "resize_as_": lambda x: x.resize_as_(torch.ones(6)),
}


def differing():
    return rank_map(lambda rank: torch.arange(6.0).view(2, 3) + 10 * rank)


@pytest.mark.parametrize("make", [differing, lambda: torch.arange(6.0).view(2, 3), lambda: differing()[:, :]])
@pytest.mark.parametrize("name", CHANGES)
def test_the_tensor_has_the_shape_and_still_its_memory(name, make, mode):
    x = make()
    base, wanted = x.view(-1), [x.on(rank) for rank in range(4)]
    assert CHANGES[name](x) is x
    with mode.disable():
        wanted = [CHANGES[name](own) for own in wanted]
    for rank, want in enumerate(wanted):
        assert torch.equal(x.on(rank), want) and x.__localtensor_on__(rank).stride() == want.stride()
    assert (
        x.shape == wanted[0].shape
        and x.stride() == wanted[0].stride()
        and x.storage_offset() == wanted[0].storage_offset()
    )
    x.add_(rank_map(lambda rank: torch.tensor(100.0 * rank)))
    assert base.on(3).max() >= 300 and base.on(0).max() < 100


def test_all_that_torch_tags_are_served():
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and hasattr(torch.ops.aten, packet):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            tagged.update([name] if op is not None and torch.Tag.inplace_view in op.tags else [])
    served = {*VIEW_OPS, "aten::resize_", "aten::resize_as_", "aten::detach_", "aten::swapaxes_", "aten::swapdims_"}
    assert tagged - {name for name in tagged if name.startswith("aten::set_")} <= served and len(tagged) > 10


def test_resize_to_another_size_on_each_rank_and_to_more():
    x = differing()
    x.resize_(dist.get_rank() + 1)
    assert [x.on(rank).tolist() for rank in (0, 3)] == [[0], [30, 31, 32, 33]]
    x.resize_(8)
    assert x.shape == (8,) and x.on(2)[:6].tolist() == [20, 21, 22, 23, 24, 25]


def test_set_to_another_tensor_and_to_nothing():
    x, y = differing(), differing() + 1
    view = x[0]
    x.set_(y)
    y.zero_()
    assert x.on(3).sum() == 0 and view.on(3).tolist() == [30, 31, 32] and x._memory is y._memory
    x.set_()
    assert x.shape == (0,)


def test_set_to_a_storage(mode):
    storage = torch.arange(4.0).on(0).untyped_storage()
    x, y = torch.empty(0).set_(storage, 1, (2,), (1,)), torch.empty(0).set_(storage, 0, (4,))
    x.add_(rank_map(lambda rank: torch.tensor(float(rank))))
    assert y.on(2).tolist() == [0, 3, 4, 3] and x._memory is y._memory
    with pytest.raises(NotInLockstep, match="the storage is that of a LocalTensor"):
        x.set_(differing().untyped_storage())


def test_detach_in_place_leaves_the_values():
    weight = nn.Parameter(differing())
    with torch.inference_mode():
        y = differing()
        assert y.detach_() is y and y.on(0).tolist() == [[0, 1, 2], [3, 4, 5]]
    x = weight * 2
    assert (
        x.requires_grad
        and x.detach_() is x
        and not x.requires_grad
        and x.on(1).tolist() == [[20, 22, 24], [26, 28, 30]]
    )


def test_gradients_go_through_a_change_of_shape():
    weight = nn.Parameter(differing())
    y = (weight * 2).t_()
    y[0].sum().backward()
    assert weight.grad.reconcile().tolist() == [[2, 0, 0], [2, 0, 0]]
