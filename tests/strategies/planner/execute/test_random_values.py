"""What ranks hold before, and the judge of what they hold after: it must see whatever is wrong."""

import pytest
import torch
from torch.distributed.tensor import Partial

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import assemble, local_shapes, split
from localtensor.layout.spec import Spec, parse
from tests.strategies.planner.execute.random_specs import Drawn, draw
from tests.strategies.planner.execute.random_values import held_of, same, wrong


def _spec(text, shape=(5, 4), sizes=(2, 2)):
    return Spec(Mesh.of(*sizes), tuple(map(parse, text.split())), shape, torch.float32)


def test_pieces_fit_their_spec_and_are_the_same_again():
    for one in draw(4, 200):
        held, again = held_of(one), held_of(one)
        assert [tuple(x.shape) for x in held] == local_shapes(one.src)
        assert all(x.dtype == one.src.dtype for x in held)
        assert all(same(x, y, bits=True) for x, y in zip(held, again, strict=True))


def test_totals_are_whole_numbers_and_parts_are_not_the_total():
    alike = tried = 0
    for one in draw(11, 400):
        pending = {p.reduce_op for p in one.src.placements if isinstance(p, Partial)}
        if one.src.dtype.is_floating_point and pending:
            held = held_of(one)
            total = assemble(held, one.src)
            assert torch.equal(total.nan_to_num(), total.nan_to_num().round()), one
            if pending == {"sum"} and total.numel() > 4 and one.src.mesh.ranks > 1:
                tried += 1
                alike += total.shape == held[0].shape and same(total, held[0], bits=False)
    assert tried > 5
    assert alike < tried / 2


def test_the_definition_is_right():
    one = Drawn(0, 1, _spec("P(sum) S(0)"), _spec("S(1) R"))
    held = held_of(one)
    assert wrong(one, held, split(assemble(held, one.src), one.dst)) == ""


@pytest.mark.parametrize("dst", ["S(0) S(0)", "S(1) R", "R R"])
def test_two_pieces_swapped_are_wrong(dst):
    one = Drawn(0, 1, _spec("S(0) R", (4, 4)), _spec(dst, (4, 4)))
    held = held_of(one)
    got = split(assemble(held, one.src), one.dst)
    if dst == "R R":
        got[3] = got[3].flip(0)
    else:
        got[0], got[3] = got[3], got[0]
    assert "is to hold" in wrong(one, held, got)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda got: got[:3], "3 tensors for 4 ranks"),
        (lambda got: [x.double() for x in got], "torch.float64"),
        (lambda got: [x[:1] for x in got], "gives it"),
        (lambda got: [got[0], got[1] + 1, got[2], got[3]], "rank 1 holds"),
        (lambda got: [-got[0], *got[1:]], "rank 0 holds"),
    ],
)
def test_other_numbers_shapes_dtypes_and_counts_are_wrong(spoil, said):
    one = Drawn(0, 2, _spec("S(0) R"), _spec("R R"))
    held = held_of(one)
    assert said in wrong(one, held, spoil(split(assemble(held, one.src), one.dst)))


def test_minus_zero_and_nan_count_where_nothing_was_reduced():
    x = torch.tensor([[0.0, float("nan")]])
    one = Drawn(0, 0, _spec("R", (1, 2), (2,)), _spec("R", (1, 2), (2,)))
    assert wrong(one, [x, x], [x, x.clone()]) == ""
    assert "is to hold" in wrong(one, [x, x], [x, torch.tensor([[-0.0, float("nan")]])])
    assert "is to hold" in wrong(one, [x, x], [x, torch.tensor([[0.0, 1.0]])])


def test_a_partial_that_adds_up_is_wrong_if_its_replicas_differ():
    one = Drawn(0, 0, _spec("R R", (1,)), _spec("P(sum) R", (1,)))
    held = [torch.tensor([5.0])] * 4
    right = [torch.tensor([value]) for value in (2.0, 2.0, 3.0, 3.0)]
    assert wrong(one, held, right) == ""
    assert "replicas" in wrong(one, held, [right[0], right[2], right[2], right[0]])
    assert "all together hold" in wrong(one, held, [right[0], right[0], right[0], right[0]])
