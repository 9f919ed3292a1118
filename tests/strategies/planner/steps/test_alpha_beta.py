"""What moving a tensor costs, and whether the steps that are paid for bring it there."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localtensor.layout import NETWORK, Network
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import assemble, assemble_axis, split, split_axis
from localtensor.layout.spec import PARTIAL_KINDS, Spec, parse
from strategies.planner.steps.alpha_beta import MovedTensor as HeldTensor
from strategies.planner.steps.alpha_beta import largest_piece_but, partials_commute, redistribute_axis

F64 = torch.float64
ANY = ["R", "S(0)", "S(1)", "SS(0,2)", *(f"P({kind})" for kind in PARTIAL_KINDS)]
LINK = Network(latency=1.0, per_byte=0.001)


def moves(shape, dtype, was, want, sizes, network=NETWORK):
    """All steps from some placements to others on a mesh of these sizes, axes from left to right."""
    held, steps = HeldTensor(tuple(shape), dtype, tuple(was)), []
    for axis, placement in enumerate(want):
        held, more = redistribute_axis(held, axis, placement, sizes, network)
        steps += more
    return steps


def steps(was, want, shape=(12, 6), sizes=(2, 3), network=LINK):
    return moves(shape, torch.float32, tuple(map(parse, was.split())), tuple(map(parse, want.split())), sizes, network)


@pytest.mark.parametrize(("kind", "ranks", "seconds"), [
    ("local", 4, 0),
    ("all_gather", 4, 2 * 1 + 3 / 4 * 0.4),
    ("reduce_scatter", 4, 2 * 1 + 3 / 4 * 0.4),
    ("all_reduce", 4, 2 * (2 * 1 + 3 / 4 * 0.4)),
    ("all_to_all", 4, 3 * 1 + 3 / 4 * 0.4),
    ("all_gather", 5, 3 * 1 + 4 / 5 * 0.4),  # lg 5 rounded up
    ("all_reduce", 1, 0),
])  # fmt: skip
def test_a_collective_costs_what_the_paper_says(kind, ranks, seconds):
    assert LINK.seconds(kind, ranks, 400) == pytest.approx(seconds)


def test_a_collective_that_there_is_not_is_no_free_one():
    with pytest.raises(KeyError):
        LINK.seconds("teleport", 2, 1)


@pytest.mark.parametrize(("was", "want", "told"), [
    ("R R", "R R", []),
    ("R R", "S(0) P(sum)", ["axis 0: R -> S(0) locally", "axis 1: R -> P(sum) locally"]),
    ("S(0) R", "R R", ["axis 0: S(0) -> R by all_gather of 288 bytes"]),
    ("R S(0)", "R S(1)", ["axis 1: S(0) -> S(1) by all_to_all of 96 bytes"]),
    ("S(1) P(sum)", "S(1) R", ["axis 1: P(sum) -> R by all_reduce of 144 bytes"]),
    ("S(1) P(sum)", "S(1) S(0)", ["axis 1: P(sum) -> S(0) by reduce_scatter of 144 bytes"]),
    ("P(max) R", "P(sum) R", ["axis 0: P(max) -> R by all_reduce of 288 bytes", "axis 0: R -> P(sum) locally"]),
    ("SS(0,2) R", "S(0) R", ["axis 0: SS(0,2) -> R by all_gather of 288 bytes", "axis 0: R -> S(0) locally"]),
    ("S(0) S(0)", "S(1) S(0)", [  # the inner cut of the same dim stands in the way of the outer
        "axis 1: S(0) -> R by all_gather of 144 bytes", "axis 0: S(0) -> S(1) by all_to_all of 144 bytes",
        "axis 1: R -> S(0) locally",
    ]),
    ("P(sum) P(max)", "R R", [  # the last axis is reduced first
        "axis 1: P(max) -> R by all_reduce of 288 bytes", "axis 0: P(sum) -> R by all_reduce of 288 bytes",
    ]),
])  # fmt: skip
def test_the_steps_and_their_bytes(was, want, told):
    assert [str(step) for step in steps(was, want)] == told


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 2, 2)]), rows=st.integers(0, 7), columns=st.integers(1, 5),
    data=st.data(),
)  # fmt: skip
def test_the_steps_bring_any_tensor_from_anywhere_to_anywhere(sizes, rows, columns, data):
    """Each step is done along its own axis alone, on the pieces; at the end they make the tensor again."""
    was, want = (tuple(parse(data.draw(st.sampled_from(ANY))) for _ in sizes) for _ in range(2))
    mesh, rng = Mesh.of(*sizes), torch.Generator().manual_seed(rows)
    x = torch.randint(-9, 9, (rows, columns), generator=rng).double()
    pieces, now = split(x, Spec(mesh, was, tuple(x.shape), F64), rng), list(was)
    for step in moves(tuple(x.shape), F64, was, want, sizes):
        assert now[step.axis] == step.was
        for group in mesh.groups(mesh.names[step.axis]):
            whole = assemble_axis([pieces[rank] for rank in group], step.was)
            for rank, piece in zip(group, split_axis(whole, step.now, len(group), rng), strict=True):
                pieces[rank] = piece
        now[step.axis] = step.now
    assert tuple(now) == want
    torch.testing.assert_close(assemble(pieces, Spec(mesh, want, tuple(x.shape), F64)), x, rtol=1e-9, atol=1e-9)


@given(
    was=st.lists(st.sampled_from(ANY), min_size=2, max_size=2),
    want=st.lists(st.sampled_from(ANY), min_size=2, max_size=2),
)
def test_only_what_is_local_is_free(was, want):
    for step in steps(" ".join(was), " ".join(want)):
        assert (step.seconds == 0) == (step.kind == "local")
        assert math.isfinite(step.seconds) and step.seconds >= 0


def test_a_larger_tensor_and_a_slower_link_cost_more():
    def cost(shape, network):
        return sum(step.seconds for step in steps("S(0) R", "R R", shape, (2, 3), network))

    assert cost((12, 6), LINK) < cost((24, 6), LINK) < cost((24, 6), Network(1.0, 0.01))


def test_the_bytes_are_those_of_the_largest_piece():
    held = HeldTensor((5, 3), torch.float16, (parse("S(0)"), parse("S(0)")))
    assert largest_piece_but(held, (2, 2)) == 2 * 3 * 2
    assert largest_piece_but(held, (2, 2), but=1) == 3 * 3 * 2


@pytest.mark.parametrize(("one", "other", "dtype", "so"), [
    ("P(sum)", "P(sum)", F64, True), ("P(sum)", "P(avg)", F64, True), ("P(sum)", "P(avg)", torch.int64, False),
    ("P(sum)", "P(max)", F64, False), ("P(min)", "P(max)", F64, False), ("P(product)", "P(avg)", F64, False),
    ("S(0)", "P(max)", F64, True), ("R", "P(max)", F64, True),
])  # fmt: skip
def test_which_reductions_commute(one, other, dtype, so):
    assert partials_commute(parse(one), parse(other), dtype) == partials_commute(parse(other), parse(one), dtype) == so
