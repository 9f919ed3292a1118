"""Whether a redistribution communicates is what DTensor then does; names, lines and the remedy of the sentence."""

import itertools
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.debug import CommDebugMode

import localtensor as lt
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import StridedShard
from strategies.propagation.explicit import redistribution_text
from strategies.propagation.explicit.redistribution_text import (
    ImplicitRedistribution,
    argument_names,
    communicating_steps,
    implicit_communication_error,
)
from strategies.torch_api.specs import device_mesh

R, S0, S1, SS, P = Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2), Partial()
META = TensorMeta(torch.Size((8, 8)), (8, 1), torch.float32)
MESH = device_mesh(Mesh.of(dp=2, tp=2))


def laid(mesh, *placements):
    return DTensorSpec(mesh, placements, tensor_meta=META)


def moved(mesh, src, dst):
    """How many collectives DTensor calls, or None where it refuses."""
    sizes = [8, 8]
    for placement, ranks in zip(src.placements, mesh.shape, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            sizes[placement.dim] //= ranks
    comms = CommDebugMode()
    try:
        with comms:
            redistribute_local_tensor(torch.ones(sizes), src, dst)
    except (RuntimeError, AssertionError, NotImplementedError):
        return None
    return comms.get_total_counts()


def all_pairs(sizes):
    mesh = init_device_mesh("cpu", sizes)
    specs = [laid(mesh, *placements) for placements in itertools.product((R, S0, S1, P), repeat=len(sizes))]
    found = [(moved(mesh, src, dst), communicating_steps(src, dst)) for src, dst in itertools.product(specs, specs)]
    return [(count, steps) for count, steps in found if count is not None]


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [(2,), (1, 2), (2, 2)])
def test_what_is_reported_to_communicate_is_what_does(sizes):
    for found in lt.run(all_pairs, sizes, ranks=torch.Size(sizes).numel()):
        assert [bool(steps) for _, steps in found] == [count > 0 for count, _ in found]
        assert {bool(steps) for _, steps in found} == {False, True}


def strided_shard():
    """A view's strided shard, which torch's own cost takes for free."""
    mesh = init_device_mesh("cpu", (2,))
    src = DTensorSpec(mesh, (SS,), tensor_meta=META, use_strided_shard_as_shard_order=False)
    return moved(mesh, src, laid(mesh, R)), communicating_steps(src, laid(mesh, R))


def test_a_strided_shard_that_is_gathered_is_reported():
    assert list(lt.run(strided_shard, ranks=2)) == [(1, ("a: SS(0,2) -> R",))] * 2


def test_a_shard_that_becomes_partial_adds_zeros_and_asks_no_one():
    """Torch 2.14 does so; before, it raises where it is to be done."""
    assert communicating_steps(laid(MESH, S0, R), laid(MESH, P, R)) == ()
    assert communicating_steps(laid(MESH, S0, R), laid(MESH, R, R)) != ()


def test_dtensors_own_refusals_are_left_to_it_and_two_meshes_too():
    other = device_mesh(Mesh.of(a=4))
    assert communicating_steps(laid(MESH, R, R), laid(other, S0)) == ()
    assert communicating_steps(laid(MESH, P, R), DTensorSpec(MESH, (Partial("max"), R), tensor_meta=META)) != ()


def test_steps_that_cannot_be_asked_for_are_no_steps_that_are_not_there(monkeypatch):
    monkeypatch.setattr(_redistribute, "_gen_transform_infos", lambda src, dst: [])
    with pytest.raises(TypeError):
        communicating_steps(laid(MESH, S0, R), laid(MESH, R, R))


def test_every_part_of_torch_that_is_used_is_there():
    assert callable(_redistribute._gen_transform_infos)
    [info] = _redistribute._gen_transform_infos(laid(MESH, S0, R), laid(MESH, R, R))
    assert (info.mesh_dim, info.src_dst_placements) == (0, (S0, R))
    assert laid(MESH, S0, R).shard_order[0].mesh_dims == (0,)
    assert torch._C._current_autograd_node() is None


def test_names_of_arguments_in_lists_and_by_keyword():
    op = torch.ops.aten.lerp.Tensor_out
    names = argument_names(op, [0, 1, 2], {"out": 3}, lambda value: value)
    assert names == {0: ("self", False), 1: ("end", False), 2: ("weight", False), 3: ("out", True)}
    listed = argument_names(torch.ops.aten._foreach_add_.List, [[0, 1], [2, 3]], {"alpha": None}, lambda value: value)
    assert listed == {0: ("self[0]", True), 1: ("self[1]", True), 2: ("other[0]", False), 3: ("other[1]", False)}


@pytest.mark.parametrize(
    ("src", "dst", "written", "remedy"),
    [
        ((S0, R), (R, R), False, "Write x.redistribute(placements=[Replicate(), Replicate()]) before it, or put it in"),
        (
            (S0, P),
            (S1, P),
            False,
            "Write x.redistribute(placements=[Shard(1), Partial('sum')]) before it, or put it in",
        ),
        ((S0, R), (P, R), False, "Write x.redistribute(placements=[Replicate(), Replicate()]) before it, or put it in"),
        ((S0, R), (R, R), True, "Put it in"),
        ((S0, R), (SS, R), False, "Put it in"),
    ],
)
def test_the_remedy_is_a_call_that_there_is(src, dst, written, remedy):
    error = implicit_communication_error(
        "aten.op", [ImplicitRedistribution("x", laid(MESH, *src), laid(MESH, *dst), written)]
    )
    assert str(error).endswith(f". {remedy} `with allow_implicit_communication():`.")


def test_more_than_one_argument_is_reported_in_one_sentence():
    needs = [
        ImplicitRedistribution("self", laid(MESH, S0, R), laid(MESH, R, R)),
        ImplicitRedistribution("other", laid(MESH, P, R), laid(MESH, R, R)),
    ]
    error = implicit_communication_error("aten.op", needs)
    assert error.arguments == ("self", "other")
    assert "): self, other: f32[8,8] @ dp:S(0), tp:R; f32[8,8] @ dp:P(sum), tp:R: the op wants them as " in str(error)
    assert "dp: all-gather S(0) -> R" in str(error) and "dp: all-reduce P(sum) -> R" in str(error)


def test_where_we_have_no_word_for_a_placement_dtensors_own_steps_are_reported():
    class OfMine(Partial):
        pass

    error = implicit_communication_error(
        "aten.op", [ImplicitRedistribution("x", laid(MESH, OfMine(), R), laid(MESH, R, R))]
    )
    assert "f32[8,8] @ dp:P(ofmine), tp:R: the op wants it as dp:R, tp:R, and would communicate by itself:" in str(
        error
    )


def test_the_line_is_the_users_past_our_own_frames():
    line = redistribution_text.user_line()
    assert (line.file, line.line) == (__file__, sys._getframe().f_lineno - 1)
    assert redistribution_text.call_text("aten.op", None) == "aten.op"
