"""Planning as a caller sees it: what is refused, the memory limit, the cache, the sentence of why, one answer everywhere."""

import math
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor._util.units import bytes_text, time_text
from localtensor.concurrency.single_flight import clear_all
from localtensor.errors import WrongType
from localtensor.layout import Network
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.planner.search.api import PLAN_CACHE, NoPlan, clear, plan, plan_uncached
from strategies.planner.search.plan_cache import PlanCache, value_key
from strategies.planner.steps.legal_steps import usable_placements
from strategies.planner.steps.prices import TOPOLOGY, Sent, Time, Topology, bytes_sent
from strategies.planner.text.parser import read
from tests.tools.plans.oracle import Oracle
from tests.tools.plans.pairs import drawn, every_spec


@pytest.fixture(autouse=True)
def nothing_known():
    clear()
    yield
    clear()


def spec(text, shape=(64, 32), sizes=(), dtype=torch.float32, order=()):
    placements = tuple(map(parse, text.split()))
    return Spec(Mesh.of(*sizes or [2] * len(placements)), placements, shape, dtype, order)


# -- what is refused


@pytest.mark.parametrize(("src", "dst", "sentence"), [
    (spec("P(sum)"), spec("P(max)"), "P(sum) does not turn into P(max): these are parts of different things. Plan to R first"),
    (spec("P(sum) P(max)"), spec("R R"), "P(sum) and P(max) do not commute: which is reduced first would matter. Reduce one"),
    (spec("S(0)"), spec("R", shape=(64, 33)), "they are not of one tensor on one mesh. Give both the same"),
    (spec("S(0)"), spec("R", sizes=(3,)), "they are not of one tensor on one mesh. Give both the same"),
    (spec("S(0)"), spec("R", dtype=torch.int64), "they are not of one tensor on one mesh. Give both the same"),
    (spec("P(max)", dtype=torch.complex64), spec("R", dtype=torch.complex64),
     "P(max) is undefined for torch.complex64. Reduce it before"),
    (spec("R", dtype=torch.int64), spec("P(avg)", dtype=torch.int64),
     "P(avg) is undefined for torch.int64. Reduce it before"),
])  # fmt: skip
def test_a_change_that_means_nothing_is_refused_in_a_sentence(src, dst, sentence):
    with pytest.raises(NoPlan) as error:
        plan(src, dst)
    message = str(error.value)
    assert message.startswith("plan: ") and sentence in message and message.count("\n") == 0


class Other(Partial):
    """A sum of something else."""


@pytest.mark.parametrize("placement", [Other("sum"), Placement()])
def test_a_placement_that_only_its_own_class_understands_is_refused(placement):
    src, dst = (replace(spec("R"), placements=(p,)) for p in (placement, parse("R")))
    for pair in ((src, dst), (dst, src)):
        with pytest.raises(
            NoPlan, match=r"is of a class that the planner does not know\. Use R, S, SS or a plain Partial"
        ):
            plan(*pair)


def test_partials_of_torch_that_mean_more_are_refused():
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    src = replace(spec("R"), placements=(_NormPartial(2),))
    with pytest.raises(NoPlan, match=r"P\(norm\) is of a class that the planner does not know"):
        plan(src, spec("R"))


# -- a limit


def oracle_of(src, dst):
    return Oracle(usable_placements(src, dst))


def test_a_limit_is_kept_by_every_step_and_costs_what_the_oracle_pays():
    rng, dearer = random.Random(1), 0
    specs = every_spec((2, 3), (7, 6))
    for _ in range(60):
        src, dst = rng.sample(specs, 2)
        free = plan_uncached(src, dst)
        oracle = oracle_of(src, dst)
        least = oracle.needs(src)[dst]
        for limit in {least, (least + free.memory) // 2, free.memory}:
            held = plan_uncached(src, dst, memory=limit)
            assert held.memory <= limit
            assert (held.price, len(held.steps)) == oracle.costs(src, Time(), limit)[dst]
            dearer += held.price > free.price
    assert dearer


def test_below_the_leanest_plan_it_is_shown_and_its_need_is_enough():
    rng, leaner = random.Random(2), 0
    specs = every_spec((2, 3), (7, 6))
    for _ in range(40):
        src, dst = rng.sample(specs, 2)
        need = oracle_of(src, dst).needs(src)[dst]
        with pytest.raises(NoPlan) as error:
            plan(src, dst, memory=need - 1)
        lean = error.value.leanest
        assert lean.memory == need and f"the leanest needs {bytes_text(need)} (" in str(error.value)
        assert all(str(step) in str(error.value) for step in lean.steps)
        assert str(error.value).endswith(f"Allow {need} bytes, or more.")
        assert plan(src, dst, memory=need) == lean
        leaner += need < plan(src, dst).memory
    assert leaner


def test_a_limit_is_reported_in_megabytes_and_what_to_allow_to_the_byte():
    src, dst = read("f32[4096,4096] @ dp=4,tp=8: P(sum),S(0) -> S(0),R")
    with pytest.raises(NoPlan, match=r"no plan stays within 10\.0 MB, and the leanest needs 33\.6 MB \(") as error:
        plan(src, dst, memory=10_000_000)
    assert str(error.value).endswith("Allow 33554432 bytes, or more.")


def test_no_memory_at_all_is_enough_where_nothing_is_to_be_done():
    assert plan(spec("S(0)"), spec("S(0)"), memory=0).steps == ()


# -- flattened axes


@pytest.mark.parametrize("names", [("dp", "dp"), ("tp", "dp", "tp")])
def test_an_axis_that_is_named_twice_in_a_group_is_refused(names):
    src, dst = read("f32[64] @ dp=2,tp=2: P(sum),P(sum) -> R,R")
    with pytest.raises(
        NoPlan, match=r"^plan: flattened: \('.*'\): an axis is named twice.* Name each axis of a group once\.$"
    ):
        plan(src, dst, flattened=[("dp", "tp"), names])


# -- what lies alike


def test_strided_shards_are_planned_as_the_order_that_they_encode():
    written, meant = spec("SS(0,2) S(0)"), spec("S(0) S(0)", order=((0, (1, 0)),))
    assert plan(written, meant).steps == plan(meant, written).steps == ()
    one, other = plan(written, spec("R S(0)")), plan(meant, spec("R S(0)"))
    assert one.steps == other.steps and [step.kind for step in one.steps] == ["all_gather"]
    assert one.src == written and other.src == meant


def test_strided_shards_that_are_no_order_for_this_shape_are_planned_as_they_are():
    written = spec("SS(0,2) S(0)", shape=(7, 3), sizes=(3, 2))
    found = plan(written, spec("S(0) S(0)", shape=(7, 3), sizes=(3, 2), order=((0, (1, 0)),)))
    assert found.steps and found.steps[0].was == written


def test_an_axis_of_one_rank_needs_no_step_and_is_in_the_way():
    src, dst = (spec(text, sizes=(1, 4)) for text in ("R S(0)", "S(0) S(0)"))
    assert plan(src, dst).steps == plan(dst, src).steps == () and plan(src, dst).why == "both are equal on every rank"
    [step] = plan(spec("S(0) S(0)", sizes=(4, 1)), spec("R S(0)", sizes=(4, 1))).steps
    assert (step.kind, step.axes) == ("all_gather", (0,))


# -- one answer


def test_the_sentence_of_why_is_true():
    rng, told = random.Random(6), 0
    specs = every_spec((2, 2), (8, 4))
    for _ in range(30):
        src, dst = rng.sample(specs, 2)
        found = plan_uncached(src, dst, Sent())
        if not found.steps:
            continue
        oracle = oracle_of(src, dst)
        others = [
            Sent()(move) + oracle.costs(now, Sent())[dst][0]
            for now, move, _ in oracle.steps(src)
            if now != found.steps[0].now
        ]
        start, _, rest = found.why.removeprefix("the cheapest of all ways: with another first step ").partition(
            " or more; "
        )
        number, unit = start.split()
        least = float(number) * {"B": 1, "kB": 1000}[unit]
        assert found.price * 0.95 <= least <= min(others) * 1.05
        assert rest.startswith(f"{found.states} layouts looked at")
        told += 1
    assert told > 20


def test_the_sentence_of_why_counts_what_is_still_to_come_after_another_first_step():
    found = plan_uncached(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"))
    assert time_text(found.seconds) == "11.3 us" and "with another first step 12.3 us or more" in found.why


def pairs(count):
    rng = random.Random(9)
    made = []
    for _ in range(count):
        mesh = Mesh.of(*[rng.choice((2, 3)) for _ in range(3)])
        made.append((drawn(rng, mesh, (8, 6)), drawn(rng, mesh, (8, 6))))
    return made


TOLD = """
import sys
sys.path.insert(0, {root!r})
from tests.strategies.planner.search.test_api import pairs
from strategies.planner.search.api import plan
for src, dst in pairs(20):
    print(plan(src, dst))
"""


@pytest.mark.slow  # a process of its own; so has test_verdict_work_unit
def test_another_process_with_another_seed_of_hashes_makes_the_same_plans(request):
    script = TOLD.format(root=str(request.config.rootpath))
    here = "".join(f"{plan(src, dst)}\n" for src, dst in pairs(20))
    command = [sys.executable, "-c", script]
    told = subprocess.run(
        command, env={"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    assert told.stdout == here and len(here) > 1000


def test_threads_share_plans_and_each_is_searched_once():
    asked, start = pairs(12), threading.Barrier(8)
    found, before = [None] * 8, searches()

    def ask(place):
        start.wait()
        found[place] = [plan(src, dst) for src, dst in asked]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is other for plans in found for one, other in zip(plans, found[0], strict=True))
    assert searches() - before == len(asked)


# -- what is remembered


def searches():
    return PLAN_CACHE.stats().misses


def asks_anew(*args, **kwargs):
    before = searches()
    plan(*args, **kwargs)
    return searches() > before


def test_a_plan_is_known_by_all_that_it_depends_on():
    src, dst = spec("S(0) S(0)"), spec("S(1) R")
    assert asks_anew(src, dst) and not asks_anew(src, dst)
    assert not asks_anew(replace(src), replace(dst)), "equal specs share plans"
    slow = Topology((Network(latency=1.0),))
    for other in (
        (replace(src, shard_order=((0, (1, 0)),)), dst), (dst, src), (src, dst, Sent()), (src, dst, Time(slow)),
        (replace(src, shape=(64, 33)), replace(dst, shape=(64, 33))),
        (replace(src, mesh=Mesh((2, 2), ("x", "y"))), replace(dst, mesh=Mesh((2, 2), ("x", "y")))),
        (spec("SS(0,1) S(0)"), dst),
    ):  # fmt: skip
        assert asks_anew(*other) and not asks_anew(*other)
    for others in ({"topology": slow}, {"memory": 10**6}, {"flattened": [["a", "b"]]}):
        assert asks_anew(src, dst, **others) and not asks_anew(src, dst, **others)


class Dearer(Time):
    """A class that overrides the price alone."""

    def __call__(self, move):
        return 2 * super().__call__(move)


def test_who_overrides_a_price_is_asked_for_it():
    src, dst = spec("S(0) S(0)"), spec("S(1) R")
    assert plan_uncached(src, dst, Dearer()).price == 2 * plan_uncached(src, dst).price


def test_tables_are_shared_by_searches_for_one_tensor_and_forgotten():
    known, offered, strange = PlanCache(), tuple(map(parse, ("R", "S(0)"))), Stranger(1)
    src, same, other = spec("S(0)"), spec("S(0)"), spec("S(0)", shape=(64, 33))
    table = known.table(src, offered, (), Time())
    assert known.table(same, offered, (), Time()) is table
    for changed in ((other, offered, (), Time()), (src, offered[:1], (), Time()), (src, offered, (), Sent()),
                    (src, offered, ((0,),), Time()), (spec("R"), offered, (), Time())):  # fmt: skip
        assert known.table(*changed) is not table
    assert known.table(src, offered, (), strange) is not known.table(src, offered, (), strange), "it may change"
    known.clear()
    assert known.table(src, offered, (), Time()) is not table


def test_a_plan_from_a_table_that_others_used_is_the_one_from_nothing():
    specs = every_spec((2, 3), (7, 6))
    rng = random.Random(12)
    for _ in range(60):
        src, dst = rng.sample(specs, 2)
        assert plan(src, dst) == plan_uncached(src, dst)


def test_clear_forgets_every_plan():
    src, dst = spec("S(0)"), spec("R")
    for forget in (clear, clear_all):
        plan(src, dst)
        forget()
        assert asks_anew(src, dst)


def test_what_is_refused_is_not_remembered():
    for _ in range(2):
        with pytest.raises(NoPlan):
            plan(spec("P(sum)"), spec("P(max)"))
    assert PLAN_CACHE.stats().size == 0


class Stranger:
    name, grows = "stranger", True

    def __init__(self, gathers):
        self.gathers = gathers

    def __call__(self, move):
        return self.gathers if move.kind == "all_gather" else 5


def test_the_name_of_a_stranger_is_not_enough():
    src, dst = spec("S(0)"), spec("R")
    assert [plan(src, dst, Stranger(gathers)).price for gathers in (1, 3, 100)] == [1, 3, 10]


def test_a_function_is_a_price_and_searched_without_a_bound():
    def hops(move):
        return 1

    assert plan(spec("S(0) S(0)"), spec("R R"), hops).price == 2
    assert plan(spec("S(0) S(0)"), spec("R R"), bytes_sent).by == "bytes_sent"


@dataclass(frozen=True)
class Listed:
    weights: list
    name: str = "listed"
    grows: bool = True

    def __call__(self, move):
        return sum(self.weights)


def test_a_price_that_may_change_is_known_by_the_object():
    src, dst = spec("S(0)"), spec("R")
    assert [plan(src, dst, Listed([weight])).price for weight in (1, 2)] == [1, 2]


@dataclass(unsafe_hash=True)
class Loose:
    """It has a hash of its values, which may change all the same."""

    weight: int


def test_what_is_not_frozen_is_known_by_the_object_even_if_it_has_a_hash_of_its_values():
    one, other = Loose(1), Loose(1)
    assert one == other
    assert value_key(one) == value_key(one) != value_key(other)


def test_an_identity_is_not_taken_for_another():
    for rows in range(8, 400):  # specs that nobody holds but the planner: their places in memory would be used again
        found = plan(spec("S(0)", shape=(rows, 2)), spec("R", shape=(rows, 2)))
        assert found.src.shape == (rows, 2)


def test_another_memory_of_plans_is_its_own():
    known = PlanCache()
    found = known.get(lambda src, dst, *_: plan_uncached(src, dst), spec("S(0)"), spec("R"), None, TOPOLOGY, None, ())
    assert found.steps and known.stats().size == 1 and PLAN_CACHE.stats().size == 0
    assert found == plan(spec("S(0)"), spec("R"))


@pytest.mark.parametrize(("options", "words"), [
    ({"memory": "1GB"}, "plan: memory: '1GB': it is no number of bytes. Pass an int, as 2 * 10**9."),
    ({"memory": math.nan}, "plan: memory: nan: it is no number of bytes. Pass an int, as 2 * 10**9."),
    ({"topology": 3}, "plan: topology: 3: it is no Topology. Pass Topology(links), with a link for each axis."),
])  # fmt: skip
def test_options_of_another_type_are_refused(options, words):
    src, dst = (Spec(Mesh.of(dp=2), (parse(p),), (4,), torch.float32) for p in ("S(0)", "R"))
    with pytest.raises(WrongType) as refused:
        plan(src, dst, **options)
    assert str(refused.value) == words
