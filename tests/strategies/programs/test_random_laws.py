"""Random ops by law: right ops keep all laws, and each planted fault breaks one law alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from localtensor.processes import Pool
from strategies.model.settings import Settings
from strategies.model.verdict import ALONE, Verdict
from strategies.programs.random_laws import has_laws, large_sample, law_programs, laws_of, validate_laws
from strategies.programs.run.law_steps import LAWS
from strategies.programs.run.real_run import run_simulated_programs
from strategies.sweep.session import validate
from strategies.validation.finding import OverloadTask
from strategies.validation.overload import validate_overload
from tests.strategies import script_runner, users
from tests.strategies.cases import numbers, sample

REPLICAS, SHARDS, VALUES, DISTRIBUTIONS, GRADIENTS = LAWS
X = numbers(4, 6, dtype=torch.float32)
aten = torch.ops.aten
OPS = {
    "native_dropout": sample("native_dropout.default", X, 0.3, True),
    "bernoulli": sample("bernoulli.default", X.abs()),
    "normal_": sample("normal_.default", X, 1.0, 2.0),
    "rand_like": sample("rand_like.default", X),
    "randint_like": sample("randint_like.low_dtype", X, -2, 9),
    "multinomial": sample("multinomial.default", X.abs(), 3, False),
    "geometric_": sample("geometric_.default", X.double(), 0.3),
    "rrelu_with_noise_functional": sample("rrelu_with_noise_functional.default", X, X, 0.1, 0.3, True),
}


def broken_laws(one, mesh=(2,), plants=True):
    """The laws that the op breaks on a mesh, each with the placements of its first tensor; of `plants`, which leave partial
    values partial, none of these."""
    tried = [program for program, _ in law_programs(one, mesh, 0)]
    assert {program.then for program in tried} == set(laws_of(one.op))
    found = run_simulated_programs(tried)
    assert [result.note for result in found if result.refused or (not result.wrong and not result.rank_results)] == []
    broken = [(program.then, program.inputs[0]) for program, result in zip(tried, found, strict=True) if result.wrong]
    return [(law, layout) for law, layout in broken if not any(p.is_partial() for p in layout) or not plants]


ON_TWO_AXES = ("native_dropout", "normal_")
"""With a gradient and without one, in place; the others are like these there."""
LAWFUL = [
    pytest.param(name, mesh, marks=[] if name in few else pytest.mark.slow)
    for mesh, few in (((2,), OPS), ((3,), ()), ((2, 2), ON_TWO_AXES))
    for name in OPS
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "mesh"), LAWFUL, ids=str)
def test_the_ops_of_torch_keep_all_laws(name, mesh):
    assert broken_laws(OPS[name], mesh, plants=False) == []


@pytest.fixture
def planted(monkeypatch):
    """A function that has DTensor run another function than an op's on local tensors."""

    def plant(op, local_run):
        def handler(called, args, kwargs):
            layout = [a.placements for a in args if isinstance(a, DTensor)][-1]
            args = [a.redistribute(placements=layout) if isinstance(a, DTensor) else a for a in args]
            first, local = args[0], [a.to_local() if isinstance(a, DTensor) else a for a in args]
            out = local_run(first, *local)
            sizes = {"shape": torch.Size((*first.shape[:-1], out.shape[-1])), "stride": (out.shape[-1], 1)}
            sizes = sizes if out.shape != local[0].shape else {"shape": first.shape, "stride": first.stride()}
            return DTensor.from_local(out, first.device_mesh, first.placements, run_check=False, **sizes)

        handlers = {**DTensor._op_dispatcher._custom_op_handlers, op: handler}
        monkeypatch.setattr(DTensor._op_dispatcher, "_custom_op_handlers", handlers)

    return plant


def uniform(local, seed):
    return torch.rand(local.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_replicas_that_draw_apart_break_that_law_alone(planted):
    planted(aten.rand_like.default, lambda x, local, *_: uniform(local, torch.initial_seed() + 17 * dist.get_rank()))
    assert broken_laws(OPS["rand_like"]) == [(REPLICAS, (Replicate(),))]


def copies(axis):
    """Uniform values that depend on the rank's coordinate on the other mesh axes alone, where this one cuts."""

    def run(x, local, *_):
        if not x.placements[axis].is_shard():
            return torch.rand_like(local)
        place = list(x.device_mesh.get_coordinate())
        place[axis] = 0
        return uniform(local, 5 + sum(10 * c for c in place))

    return run


def test_shards_that_are_copies_break_that_law_alone(planted):
    planted(aten.rand_like.default, copies(0))
    assert broken_laws(OPS["rand_like"], (3,)) == [(SHARDS, (Shard(0),)), (SHARDS, (Shard(1),))]


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_that_are_copies_along_one_axis_of_a_mesh_are_found(planted, axis):
    planted(aten.rand_like.default, copies(axis))
    found = [layout for law, layout in broken_laws(OPS["rand_like"], (2, 2)) if law == SHARDS]
    assert found and all(layout[axis].is_shard() for layout in found)


def test_draws_that_repeat_without_replacement_are_impossible_values_and_nothing_else(planted):
    planted(aten.multinomial.default, lambda x, local, count, *_: torch.multinomial(local, count, True))
    assert broken_laws(OPS["multinomial"]) == [(VALUES, (Replicate(),)), (VALUES, (Shard(0),))]


def test_a_probability_that_is_a_little_off_is_another_distribution_and_nothing_else(planted):
    planted(aten.bernoulli.default, lambda x, local: torch.bernoulli(torch.where(local == 0.25, 0.4, local)))
    found = broken_laws(OPS["bernoulli"])
    assert [law for law, _ in found] == [DISTRIBUTIONS] * 3


def test_a_gradient_by_another_mask_than_the_forwards_breaks_that_law_alone(planted):
    def backward(grad, local, mask, scale):
        return aten.native_dropout_backward(local, torch.rand(mask.shape) < 0.7, scale)

    planted(aten.native_dropout_backward.default, backward)
    assert {law for law, _ in broken_laws(OPS["native_dropout"])} == {GRADIENTS}


@pytest.mark.slow
def test_only_rules_without_a_law_are_right_by_their_metadata():
    one = OPS["native_dropout"]
    task = OverloadTask(
        one.op, (one, sample("native_dropout.default", X[None, None, None], 0.3, True)), ((2,),), 0, ALONE
    )
    results = validate_overload(task, lambda step: None)
    before = set.union(*(r.by_metadata for r in results))
    validate_laws(task, results, lambda step: None)
    after = set.union(*(r.by_metadata for r in results))
    lines = {rule.partition(": ")[2] for rule in before - after}
    assert {"R -> R, R", "S(0) -> S(0), S(0)", "S(1) -> S(1), S(1)"} == lines
    assert {rule.partition(": ")[2] for rule in after} == {"S(3) -> S(3), S(3)", "S(4) -> S(4), S(4)"}
    assert not any("law" in name for r in results for name in r.suspects) and not any(r.crashed for r in results)


def test_ops_that_draw_more_than_once_or_are_not_random_have_no_laws():
    named = ["gru.input", "relu.default", "empty_like.default", "native_dropout.default", "uniform_.default"]
    assert [has_laws(f"aten.{name}") for name in named] == [False, False, False, True, True]


def test_a_call_that_has_no_large_form_has_none():
    assert large_sample(sample("rand_like.default", X.int()), alike=True) is None
    assert large_sample(sample("rand_like.default", torch.tensor(1.0)), alike=True) is None


RULES = """
from torch.distributed.tensor import Partial

register_sharding(torch.ops.aten.randn_like.default)(
    lambda x, *_, **__: [(R, R), (S0, S0), ([Partial()], [Partial()])]
)


def samples(op):
    yield (torch.arange(12.0).reshape(4, 3),), {}
"""


@pytest.mark.slow
def test_a_sum_of_normal_values_is_found_confirmed_on_gloo_and_has_a_script(tmp_path):
    with users.undone():
        name = users.write(tmp_path, "lawless", RULES)
        report = validate(Settings(rules=name, folder=str(tmp_path), workers=1, ranks=(2,)))
    (found,) = report.findings
    assert (found.verdict, found.confirmed_on) == (Verdict.UNSOUND, "gloo")
    assert found.title == f"aten.randn_like.default on (2,): P(sum), then {DISTRIBUTIONS}"
    assert ", expected 0" in found.reason and found.command
    text = found.script.replace("import lawless", f"sys.path.insert(0, {str(tmp_path)!r})\nimport lawless")
    with Pool(2, backend="gloo", timeout=60) as pool:
        codes = [outcome.value[0] for outcome in pool.call(script_runner.run_script, [(text,)] * 2)]
    assert codes[0] == 1
