"""Plans on lists of tensors and on LocalTensors: right, never in place, and folded."""

import pytest
import torch

import localtensor as lt
from localtensor.errors import WrongPieces
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import assemble, split
from localtensor.layout.spec import Spec, parse
from strategies.planner.execute import rows
from strategies.planner.execute.lockstep import OtherDtype, redistribute
from strategies.planner.search.api import plan
from strategies.planner.steps.legal_steps import legal_changes
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import priced_step
from tests.strategies.planner.execute.random_specs import Drawn
from tests.strategies.planner.execute.random_values import held_of, same, wrong
from tests.tools.plans.trials import every_step, in_lists, in_lockstep, trials


def _spec(text, shape, sizes, dtype=torch.float32):
    return Spec(Mesh.of(*sizes), tuple(map(parse, text.split())), shape, dtype)


def _plan(src, dst, shape, sizes, dtype=torch.float32, **settings):
    return plan(_spec(src, shape, sizes, dtype), _spec(dst, shape, sizes, dtype), **settings)


def test_random_redistributions_equal_the_definition_on_lists():
    wrong = [found for trial in trials(101, range(200), ranks=8) if (found := in_lists(trial))]
    assert not wrong, wrong[0]


def test_random_redistributions_equal_the_definition_in_lockstep():
    wrong = [found for trial in trials(102, range(80), ranks=8) if (found := in_lockstep(trial))]
    assert not wrong, wrong[0]


@pytest.mark.slow
def test_every_legal_step_is_right_alone():
    kinds = set()
    for number, trial in enumerate(every_step([(2, 2), (3, 2)], [(5,), (3, 2)], [torch.float32])):
        if number % 4 == 0:
            kinds.add(trial.plan.steps[0].kind)
            assert in_lists(trial) == ""
            if number % 16 == 0:
                assert in_lockstep(trial) == ""
    assert kinds == {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "local"}


def test_a_list_of_other_shapes_is_refused():
    with pytest.raises(WrongPieces):
        redistribute([torch.ones(2), torch.ones(2)], _plan("S(0)", "R", (3,), (2,)))


def test_another_dtype_than_the_plans_is_refused():
    wanted = _plan("P(avg)", "R", (2,), (2,))
    with pytest.raises(OtherDtype, match=r"redistribute: held: torch.int64: the plan is for f32\[2\]"):
        redistribute([torch.ones(2), torch.ones(2, dtype=torch.int64)], wanted)
    with lt.LocalTensorMode(2), pytest.raises(OtherDtype):
        redistribute(lt.LocalTensor([torch.ones(2, dtype=torch.int64)] * 2), wanted)


def test_ranks_that_are_not_in_the_mesh_hold_nothing_afterwards():
    wanted = _plan("S(0)", "R", (3,), (2,))
    with lt.LocalTensorMode(4):
        got = redistribute(lt.LocalTensor([torch.ones(2), torch.ones(1)] * 2), wanted)
    assert got.ranks == (0, 1)


@pytest.mark.parametrize("folded", [False, True])
def test_complex_averages_that_are_whole_numbers_come_out_whole(folded):
    wanted = _plan("P(avg)", "R", (600,), (15,), torch.complex64)
    x = torch.complex(torch.arange(-300.0, 300), torch.arange(300.0, -300, -1))
    held = [15 * x] + [torch.zeros_like(x)] * 14
    with lt.LocalTensorMode(15):
        got = redistribute(lt.LocalTensor(held), wanted).on(7) if folded else redistribute(held, wanted)[7]
    assert torch.equal(got, x)


@pytest.mark.parametrize(("src", "dst"), [("S(0)", "R"), ("S(1)", "S(0)"), ("P(sum)", "S(0)"), ("P(product)", "R")])
@pytest.mark.parametrize("folded", [False, True])
def test_what_is_conjugated_by_a_mark_alone_is_conjugated_in_the_end(src, dst, folded):
    wanted = _plan(src, dst, (3, 4), (2,), torch.complex64)
    held = held_of(Drawn(3, 1, wanted.src, wanted.dst))
    want = split(assemble([x.conj().resolve_conj() for x in held], wanted.src), wanted.dst)
    with lt.LocalTensorMode(2):
        marked = [x.conj() for x in held]
        if folded:
            after = redistribute(lt.LocalTensor(marked), wanted)
            got = [after.on(rank) for rank in range(2)]
        else:
            got = redistribute(marked, wanted)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("src", "dst"), [("S(0)", "S(1)"), ("S(0)", "R"), ("P(sum)", "S(0)"), ("P(max)", "SS(0,2)")])
def test_an_uneven_step_copies_twice_the_pieces_for_twice_the_ranks(src, dst, monkeypatch):
    copied, pairs = [], rows._row_views
    monkeypatch.setattr(rows, "_row_views", lambda *args: copied.append(args) or pairs(*args))
    for ranks in (32, 64):
        copied.clear()
        shape = (ranks + 1, ranks + 3)
        step = _one_step(_spec(src, shape, (ranks,)), dst)
        one = Drawn(0, 1, step.src, step.dst)
        held = held_of(one)
        with lt.LocalTensorMode(ranks):
            got = redistribute(lt.LocalTensor(held), step)
        assert wrong(one, held, [got.on(rank) for rank in range(ranks)]) == ""
        assert len(copied) <= 2 * ranks


def test_flattened_axes_that_cut_from_right_to_left_are_gathered_in_that_order():
    src = Spec(Mesh.of(2, 3), (parse("S(0)"), parse("S(0)")), (12,), torch.float32, ((0, (1, 0)),))
    change = next(change for change in legal_changes(src, [parse("R")], [(0, 1)]) if change.axes == (0, 1))
    step = priced_step(change.kind, change.axes, src, change.now)
    x = torch.arange(12.0)
    with lt.LocalTensorMode(6):
        got = redistribute(lt.LocalTensor(split(x, src)), Plan(src, change.now, (step,), 0, "", "", 0))
    assert torch.equal(got.on(4), x)


def _one_step(src, text):
    now = parse(text)
    kind = next(change for change in legal_changes(src, [now]) if change.now.placements == (now,))
    return Plan(src, kind.now, (priced_step(kind.kind, kind.axes, src, kind.now),), 0, "", "", 0)


def test_nothing_to_do_gives_back_what_was_given():
    held = [torch.ones(3), torch.ones(3)]
    assert redistribute(held, _plan("R", "R", (3,), (2,))) is held


def test_no_gradient_flows():
    held = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    assert not any(x.requires_grad for x in redistribute(held, _plan("R", "S(0)", (3,), (2,))))


@pytest.mark.parametrize("dst", ["P(sum)", "P(min)", "P(max)", "P(product)", "P(avg)"])
def test_minus_zero_nan_and_infinity_survive_a_partial(dst):
    x = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 3.0])
    there, back = _plan("R", dst, (6,), (3,)), _plan(dst, "R", (6,), (3,))
    for got in redistribute(redistribute([x] * 3, there), back):
        assert same(got, x, bits=True)


@pytest.mark.parametrize("text", ["P(sum)", "P(max)"])
def test_shards_become_parts_that_keep_the_sign_of_zero(text):
    x = torch.tensor([-0.0, 0.0, -1.0])
    shards = _spec("S(0)", (3,), (2,))
    there = _only_step(shards, text)
    for got in redistribute(redistribute(split(x, shards), there), _plan(text, "R", (3,), (2,))):
        assert same(got, x, bits=True)


def _only_step(src, text):
    return next(
        trial.plan
        for trial in every_step([src.mesh.sizes], [src.shape], [src.dtype])
        if trial.one.src == src and trial.one.dst.placements == (parse(text),)
    )


@pytest.mark.parametrize(("src", "dst", "shape"), [("S(0) R", "R R", (8192, 2)), ("S(0) R", "R R", (100, 2))])
def test_a_thousand_ranks_that_come_to_hold_the_same_hold_it_once(src, dst, shape):
    wanted = _plan(src, dst, shape, (64, 16))
    x = torch.arange(shape[0] * 2.0).view(shape)
    with lt.LocalTensorMode(1024):
        got = redistribute(lt.LocalTensor(split(x, wanted.src)), wanted)
    assert got._partition.rows == 1
    assert torch.equal(got.on(1023), x)


def test_parts_among_a_thousand_ranks_are_two_values():
    wanted = _plan("R", "P(sum)", (4,), (1024,))
    with lt.LocalTensorMode(1024):
        got = redistribute(lt.LocalTensor([torch.ones(4)] * 1024), wanted)
    assert got._partition.rows == 2
    assert got.on(0).tolist() == [1.0] * 4
    assert got.on(1023).tolist() == [0.0] * 4


@pytest.mark.parametrize("rows", [64, 37])
def test_chunks_of_a_value_that_all_have_are_cut_once_each(rows):
    wanted = _plan("R R", "R S(0)", (rows,), (64, 16))
    x = torch.arange(float(rows))
    with lt.LocalTensorMode(1024):
        got = redistribute(lt.LocalTensor([x] * 1024), wanted)
    assert got._partition.rows <= 16
    assert torch.equal(got.on(1 * 16 + 3), split(x, _spec("S(0)", (rows,), (16,)))[3])
