"""Pieces against DTensor's own cutting, and against the definition of partial values."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import localtensor as lt
from localtensor.errors import BadPlacement, NoSuchDim, NotReducible
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import assemble, local_shapes_on
from localtensor.layout.spec import Spec, shorts
from strategies.programs.run.step_functions import laid, local_inputs_of, spread, uneven, whole
from tests.strategies.cases import numbers, probe, rule, sample
from tests.strategies.programs_of import on

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def held(x, text, mesh, **options):
    return local_inputs_of(on(sample("neg.default", x), text, mesh, **options))[0]


@pytest.mark.few(16)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("placements", [
    (S0,), (S1,), (R, S0), (S0, S0), (S0, S1), (S0, R), (_StridedShard(0, split_factor=2), S0), (S1, R, S1),
], ids=shorts)  # fmt: skip
def test_pieces_and_shapes_are_those_that_dtensor_makes_whole_again(mesh, placements):
    placements = (*placements, R, R)[: len(mesh)]
    if isinstance(placements[0], _StridedShard):  # its factor is the size of the axis that cuts the dim first
        placements = (_StridedShard(0, split_factor=mesh[1]), *placements[1:]) if len(mesh) > 1 else (S0,)
    x = numbers(5, 7)
    program = on(sample("neg.default", x), "R", mesh)
    object.__setattr__(program, "inputs", (placements,))
    pieces = local_inputs_of(program)[0]
    assert [tuple(p.shape) for p in pieces] == local_shapes_on(x.shape, placements, mesh)

    def body():
        spread = DTensor.from_local(
            pieces[torch.distributed.get_rank()].clone(), init_device_mesh("cpu", mesh), placements, run_check=False,
            shape=x.shape, stride=x.stride(),
        )  # fmt: skip
        return spread.full_tensor()

    for gathered in lt.run(body, ranks=program.ranks):
        assert torch.equal(gathered, x)


@pytest.mark.parametrize(("text", "mesh"), [
    ("P(sum)/P(sum)", (2, 3)), ("P(avg)/P(avg)", (2, 2)), ("P(sum)/P(avg)", (2, 2)), ("P(max)/S(0)", (2, 2)),
    ("S(0)/P(min)", (2, 2)), ("P(product)/R/P(product)", (2, 2, 2)), ("S(0)/P(sum)/S(0)", (2, 2, 2)),
])  # fmt: skip
@pytest.mark.parametrize("draw", [0, 1])
def test_partial_pieces_make_the_whole_on_any_mesh(text, mesh, draw):
    x = numbers(5, 3)
    program = on(sample("neg.default", x), text, mesh, draw=draw)
    pieces = local_inputs_of(program)[0]
    whole = assemble(pieces, Spec(Mesh.of(*mesh), program.inputs[0], (5, 3), x.dtype))
    torch.testing.assert_close(whole, x)
    assert len({str(piece.tolist()) for piece in pieces}) > 1


def test_replicas_of_a_part_are_the_same_part():
    left = held(numbers(3), "R/P(sum)", (2, 2))
    assert torch.equal(left[0], left[2]) and torch.equal(left[1], left[3]) and not torch.equal(left[0], left[1])


def test_the_same_program_has_the_same_pieces_and_another_draw_has_others():
    x = numbers(4, 4)
    first, again, other = (held(x, "P(sum)/P(avg)", (2, 2), draw=draw) for draw in (0, 0, 1))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0], held(x, "P(sum)/P(avg)", (2, 2), seed=1)[0])


def test_on_one_axis_the_pieces_are_those_of_the_probe():
    one = sample("neg.default", numbers(4, 4))
    ours = local_inputs_of(on(one, "P(max)", (3,), draw=1))
    assert all(map(torch.equal, ours[0], probe(one, 3).case(rule(one, "P(max) -> P(max)"), 1).held[0]))


@pytest.mark.parametrize(("x", "text", "error", "said"), [
    (numbers(4, dtype=torch.bool), "P(avg)", NotReducible, "avg of torch.bool is not defined"),
    (numbers(4), "S(1)", NoSuchDim, "a tensor of 1 dims"),
    (numbers(4), "SS(1,2)", NoSuchDim, "a tensor of 1 dims"),
    (numbers(4), "P(sum)/P(max)", BadPlacement, "max and sum do not commute"),
])  # fmt: skip
def test_what_cannot_be_held_is_refused(x, text, error, said):
    with pytest.raises(error, match=said):
        held(x, text, (2, 2) if "/" in text else (2,))


def test_a_placement_for_each_axis():
    program = on(sample("neg.default", numbers(4)), "S(0)", (2, 2))
    object.__setattr__(program, "inputs", ((S0,),))
    with pytest.raises(BadPlacement, match="1 placements for 2 mesh axes"):
        local_inputs_of(program)


def test_a_placement_of_dtensors_own_is_refused():
    class Odd(Partial):
        pass

    program = on(sample("neg.default", numbers(4)), "S(0)")
    object.__setattr__(program, "inputs", ((Odd("sum"),),))
    with pytest.raises(BadPlacement):
        local_inputs_of(program)


def test_averages_of_integers_on_two_axes_are_refused_and_of_floats_are_not():
    whole = torch.arange(4)
    with pytest.raises(BadPlacement, match=r"averages of torch\.int64 round"):
        held(whole, "P(avg)/P(sum)", (2, 2))
    assert len(held(whole.double(), "P(avg)/P(sum)", (2, 2))) == 4
    assert len(held(whole, "P(avg)", (2,))) == 2


X = torch.arange(6.0).view(3, 2)


def test_a_plain_tensor_stays_as_it_is():
    assert whole(X) is X and laid(X, Shard(0)) is X and spread(X, X, Shard(0)) is X


def test_a_dtensor_is_gathered_laid_and_spread():
    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        x = DTensor.from_local(X, mesh, [Replicate()] * 2, run_check=False)
        cut = laid(x, Shard(1))
        dot = spread(torch.tensor(2.0), x, Shard(0))
        rows = spread(X, x, Shard(0))
        return whole(cut), cut.placements, dot.placements, rows.placements, rows.to_local()

    for rank, (gathered, cut, dot, rows, mine) in enumerate(lt.run(body, ranks=4)):
        assert torch.equal(gathered, X)
        assert (cut, dot, rows) == ((Shard(1), Shard(1)), (Replicate(), Replicate()), (Shard(0), Replicate()))
        assert torch.equal(mine, X[:2] if rank < 2 else X[2:])


def test_no_two_values_of_a_cotangent_are_alike_and_both_signs_are_there():
    values = uneven((5, 4), torch.float64, "cpu")
    assert len(set(values.flatten().tolist())) == 20
    assert (values > 0).any() and (values < 0).any()
    assert values.dtype == torch.float64 and uneven((), torch.float32, "cpu").shape == ()
