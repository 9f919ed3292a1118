"""Plans carried out by ranks: on threads, on gloo processes, in torch's meshes, within the memory that is promised."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import localtensor as lt
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import assemble, split
from localtensor.layout.spec import Spec, parse
from strategies.planner.execute.process_groups import NotPlanned, axes_of, groups_along, redistribute_local
from strategies.planner.search.api import plan
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import priced_step
from tests.strategies.planner.execute.random_specs import Drawn
from tests.strategies.planner.execute.random_values import held_of, same
from tests.tools.plans.plan_memory import InUse
from tests.tools.plans.trials import Trial, by_ranks, trials


def _spec(text, shape, sizes, dtype=torch.float32):
    return Spec(Mesh.of(*sizes), tuple(map(parse, text.split())), shape, dtype)


def _plan(src, dst, shape, sizes, dtype=torch.float32, **settings):
    return plan(_spec(src, shape, sizes, dtype), _spec(dst, shape, sizes, dtype), **settings)


def _moved(wanted, held, on=None, world=None):
    """What each rank of the mesh holds after a plan, on threads; the others hold nothing and come along."""
    mesh = wanted.src.mesh

    def body():
        rank = dist.get_rank()
        ranks = list(range(mesh.ranks)) if on is None else on
        mine = held[ranks.index(rank)] if rank in ranks else torch.empty(0)
        with groups_along(mesh, axes_of([wanted]), on) as groups:
            return redistribute_local(mine, wanted, groups)

    got = lt.run(body, ranks=world or mesh.ranks, leftovers="raise")
    return [got[rank] for rank in (range(mesh.ranks) if on is None else on)]


def test_random_redistributions_equal_the_definition_on_rank_threads():
    assert by_ranks(list(trials(103, range(80), ranks=6)), "threads") == []


def test_random_redistributions_equal_the_definition_on_gloo_processes():
    drawn = [trial for trial in trials(104, range(110), ranks=4) if trial.one.world <= 4 and trial.plan.steps]
    assert len(drawn) >= 40
    assert by_ranks(drawn[:40], "gloo") == []


def test_an_even_all_gather_along_dim_0_is_one_collective_into_the_result_itself():
    wanted = _plan("S(0)", "R", (8, 3), (4,))
    x = torch.arange(24.0).view(8, 3)
    held = split(x, wanted.src)

    def body():
        mine = held[dist.get_rank()].clone()
        with groups_along(wanted.src.mesh, axes_of([wanted])) as groups, InUse() as used:
            got = redistribute_local(mine, wanted, groups)
        return got, used.peak

    for got, peak in lt.run(body, ranks=4):
        assert torch.equal(got, x)
        assert peak == (2 * 3 + 8 * 3) * 4


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("dst", ["R", "S(0)", "S(1)"])
def test_nan_survives_a_minimum_and_a_maximum_whichever_rank_has_it(kind, dst):
    wanted = _plan(f"P({kind})", dst, (3, 2), (3,))
    for owner in range(3):
        held = [torch.full((3, 2), float(rank)) for rank in range(3)]
        held[owner][1, 1] = float("nan")
        want = split(assemble(held, wanted.src), wanted.dst)
        for x, y in zip(_moved(wanted, held), want, strict=True):
            assert same(x, y, bits=True)


def test_nan_survives_on_gloo_processes_too():
    asked = []
    for number in range(6):
        src, dst = (_spec(text, (32,), (4,)) for text in ("P(max)", ("R", "S(0)")[number % 2]))
        asked.append(Trial(Drawn(0, number, src, dst), plan(src, dst)))
        assert any(x.isnan().any() for x in held_of(asked[-1].one))
    assert by_ranks(asked, "gloo") == []


def test_complex_products_are_reduced_though_no_collective_does_it():
    held = [torch.tensor([1 + 2j, 3j]), torch.tensor([2 - 1j, -1j])]
    wanted = _plan("P(product)", "R", (2,), (2,), torch.complex64)
    assert [x.tolist() for x in _moved(wanted, held)] == [[4 + 3j, 3 + 0j]] * 2


@pytest.mark.parametrize("transposed", [True, False])
def test_what_a_rank_brings_may_lie_anyhow_and_is_not_written_to(transposed):
    wanted = _plan("P(sum)", "R", (3, 2), (2,))
    want = torch.arange(6.0).view(2, 3).t() if transposed else torch.arange(6.0).view(3, 2)
    held = [want.clone().requires_grad_() for _ in range(2)]
    assert held[0].is_contiguous() is not transposed
    for got in _moved(wanted, held):
        assert got.is_contiguous()
        assert not got.requires_grad
        assert torch.equal(got, 2 * want)
    assert torch.equal(held[0], want)


def test_ranks_outside_of_the_mesh_come_along_with_nothing():
    wanted = _plan("S(0)", "R", (5,), (2,))
    x = torch.arange(5.0)
    got = _moved(wanted, split(x, wanted.src), on=[3, 1], world=5)
    assert all(torch.equal(one, x) for one in got)


def test_a_mesh_whose_ranks_stand_in_another_order_has_its_pieces_in_its_own():
    wanted = _plan("S(0) R", "S(1) S(0)", (5, 4), (2, 2))
    x = torch.arange(20.0).view(5, 4)
    order = [3, 2, 0, 1]
    held, want = split(x, wanted.src), split(x, wanted.dst)

    def body():
        mesh = DeviceMesh("cpu", torch.tensor(order).view(2, 2))
        here = order.index(dist.get_rank())
        with groups_along(wanted.src.mesh, axes_of([wanted]), mesh) as groups:
            return redistribute_local(held[here], wanted, groups)

    got = lt.run(body, ranks=4, leftovers="ignore")
    assert all(torch.equal(got[rank], want[here]) for here, rank in enumerate(order))


@pytest.mark.parametrize("named", [True, False])
def test_slices_of_a_larger_mesh_make_groups_of_flattened_axes_each_of_its_own_ranks(named):
    wanted = _plan("P(sum) P(sum)", "R R", (3,), (2, 2), flattened=[("a", "b")])

    def body():
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "a", "b"))
        mine = cube["a", "b"] if named else cube["a", "b"].mesh.flatten().tolist()
        with groups_along(wanted.src.mesh, axes_of([wanted]), mine) as groups:
            return redistribute_local(torch.full((3,), float(dist.get_rank())), wanted, groups)

    got = lt.run(body, ranks=8, leftovers="ignore")
    assert [x.tolist() for x in got] == [[6.0] * 3] * 4 + [[22.0] * 3] * 4


@pytest.mark.parametrize(("src", "dst"), [("S(0)", "R"), ("S(1)", "S(0)"), ("P(sum)", "S(0)"), ("P(product)", "R")])
def test_what_is_conjugated_by_a_mark_alone_travels_conjugated(src, dst):
    wanted = _plan(src, dst, (3, 4), (2,), torch.complex64)
    held = held_of(Drawn(3, 1, wanted.src, wanted.dst))
    want = split(assemble([x.conj().resolve_conj() for x in held], wanted.src), wanted.dst)
    for x, y in zip(_moved(wanted, [x.conj() for x in held]), want, strict=True):
        torch.testing.assert_close(x, y)


def test_a_single_element_may_lie_with_any_stride():
    wanted = _plan("P(sum)", "R", (1,), (2,), torch.int16)
    held = [torch.ones(1, 2, dtype=torch.int16)[:, 1] for _ in range(2)]
    assert held[0].stride() == (2,)
    assert [x.tolist() for x in _moved(wanted, held)] == [[2], [2]]


def test_flattened_axes_have_a_group_of_their_own():
    wanted = _plan("P(sum) P(sum)", "R R", (3,), (2, 2), flattened=[("a", "b")])
    assert axes_of([wanted]) == ((0, 1),)
    assert [x.tolist() for x in _moved(wanted, [torch.ones(3)] * 4)] == [[4.0] * 3] * 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p, g: redistribute_local(torch.ones(3), p, g), r"local: .*shape \(3,\)"),
        (lambda p, g: redistribute_local(torch.ones(2, dtype=torch.int64), p, g), "local: .*int64"),
        (lambda p, g: redistribute_local(None, p, g), "local: NoneType: rank . of"),
    ],
)
def test_a_piece_that_is_not_the_ranks_own_is_refused(call, said):
    wanted = _plan("S(0)", "R", (4,), (2,))

    def body():
        with groups_along(wanted.src.mesh, axes_of([wanted])) as groups, pytest.raises(NotPlanned, match=said):
            call(wanted, groups)
        return True

    assert all(lt.run(body, ranks=2))


def test_missing_groups_other_meshes_and_a_world_too_small_are_refused():
    wanted = _plan("S(0)", "R", (4,), (2,))

    def body():
        mine = torch.ones(2)
        with groups_along(wanted.src.mesh, []) as groups, pytest.raises(NotPlanned, match="along a, of which"):
            redistribute_local(mine, wanted, groups)
        with groups_along(Mesh.of(x=2), [(0,)]) as groups, pytest.raises(NotPlanned, match=r"Mesh\(x=2\)"):
            redistribute_local(mine, wanted, groups)
        with pytest.raises(NotPlanned, match="3 ranks"), groups_along(Mesh.of(3), [(0,)]):
            pass
        with (
            pytest.raises(NotPlanned, match="the plan is for"),
            groups_along(Mesh.of(1, 2), [(0,)], init_device_mesh("cpu", (2, 1))),
        ):
            pass
        return True

    assert all(lt.run(body, ranks=2, leftovers="ignore"))


@pytest.mark.slow
def test_no_step_has_more_in_use_than_it_promises():
    tried = exchanged = 0
    for trial in trials(105, range(60), ranks=6):
        steps = tuple(Plan(step.was, step.now, (step,), 0, "", "", 0) for step in trial.plan.steps)
        if steps:
            tried += len(steps)
            exchanged += sum(step.move.exchanged for step in trial.plan.steps)
            held = [x.clone(memory_format=torch.contiguous_format) for x in held_of(trial.one)]
            peaks = lt.run(_measured, steps, held, ranks=len(held))
            for step, *each in zip(trial.plan.steps, *peaks, strict=True):
                assert max(each) <= step.memory, (trial.one, step)
    assert tried > 40 and exchanged > 5


def test_a_plan_for_a_smaller_mesh_is_refused_on_every_rank_of_the_groups():
    wanted = _plan("S(0)", "R", (4,), (2,))

    def body():
        with (
            groups_along(Mesh.of(2, 2), [(0,)]) as groups,
            pytest.raises(NotPlanned, match=r"groups: Mesh\(a=2, b=2\)"),
        ):
            redistribute_local(torch.ones(2), wanted, groups)
        return True

    assert all(lt.run(body, ranks=4))


def test_nothing_of_a_step_is_kept_through_those_after_it():
    whole, parts = _spec("R", (64,), (2,)), _spec("P(sum)", (64,), (2,))
    there, back = priced_step("local", (0,), whole, parts), priced_step("all_reduce", (0,), parts, whole)
    long = Plan(whole, whole, (there, back) * 4, 0, "", "", 0)
    for peak in lt.run(_measured_whole, (long,), [torch.ones(64)] * 2, ranks=2):
        assert peak <= 3 * 64 * 4  # what was brought, what a step begins with, and what it makes


def _measured_whole(plans, x):
    with groups_along(plans[0].src.mesh, axes_of(plans)) as groups, InUse() as used:
        redistribute_local(x, plans[0], groups)
    return used.peak


def test_what_a_step_left_is_reduced_where_it_lies():
    wanted = _plan("P(sum) P(sum)", "R R", (), (2, 2))
    assert [step.kind for step in wanted.steps] == ["all_reduce", "all_reduce"]
    for peak in lt.run(_measured_whole, (wanted,), [torch.ones(())] * 4, ranks=4):
        assert peak == 2 * 4  # what was brought, and one copy of it


def _measured(steps, x):
    """The most bytes that this rank has in use in each of these plans, one after the other."""
    peaks = []
    with groups_along(steps[0].src.mesh, axes_of(steps)) as groups:
        for one in steps:
            with InUse() as used:
                x = redistribute_local(x, one, groups)
            peaks.append(used.peak)
    return peaks
