"""A right rule is never called wrong, and the probe agrees with a slow twin made of plain loops."""

import itertools
import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.reductions import is_reducible
from localtensor.layout.spec import PARTIAL_KINDS, parse, short, shorts
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, Rule
from strategies.validation.probe import Probe
from tests.strategies.cases import numbers, placements, sample

Ranks = st.integers(2, 5)
Dtypes = st.sampled_from([torch.float64, torch.int64])
Shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
Seeds = st.integers(0, 2**20)


@st.composite
def tensors(draw, shapes=Shapes, dtypes=Dtypes):
    return numbers(*draw(shapes), dtype=draw(dtypes), seed=draw(Seeds))


def evidence(one, line, ranks, seed):
    """What the probe has against a rule, or None."""
    inputs, outputs = line.split(" -> ")
    claim = Claim(Rule(one.op, placements(inputs), placements(outputs)), "law")
    return Probe(one, run_oracle(one), ranks, seed=seed).judge(claim)


# Right rules.


POINTWISE = {
    "neg.default": {"sum": "sum", "avg": "avg", "min": "max", "max": "min"},
    "relu.default": {"min": "min", "max": "max"},
    "abs.default": {"product": "product"},
    "sign.default": {"min": "min", "max": "max", "product": "product"},
    "clone.default": {kind: kind for kind in PARTIAL_KINDS},
}
"""Ops on each element alone, and which Partial of the input gives which of the output."""


@given(x=tensors(), ranks=Ranks, seed=Seeds, op=st.sampled_from(sorted(POINTWISE)))
def test_a_pointwise_op_keeps_shards_and_replicas(x, ranks, seed, op):
    one = sample(op, x)
    for placement in ("R", *(f"S({dim})" for dim in range(x.ndim))):
        assert evidence(one, f"{placement} -> {placement}", ranks, seed) is None


@given(x=tensors(), ranks=Ranks, seed=Seeds, op=st.sampled_from(sorted(POINTWISE)))
def test_a_pointwise_op_keeps_the_partials_that_it_commutes_with(x, ranks, seed, op):
    for given_kind, made in POINTWISE[op].items():
        if given_kind == "avg" and not x.dtype.is_floating_point:
            continue  # an average of integers is no integer
        assert evidence(sample(op, x), f"P({given_kind}) -> P({made})", ranks, seed) is None


@given(x=tensors(), y=Seeds, ranks=Ranks, seed=Seeds)
def test_addition_is_linear_in_both_and_multiplication_in_each(x, y, ranks, seed):
    y = numbers(*x.shape, dtype=x.dtype, seed=y)
    for op, line in (("add.Tensor", "P(sum), P(sum) -> P(sum)"), ("mul.Tensor", "P(sum), R -> P(sum)"),
                     ("mul.Tensor", "R, P(sum) -> P(sum)"), ("maximum.default", "P(max), P(max) -> P(max)")):  # fmt: skip
        assert evidence(sample(op, x, y), line, ranks, seed) is None


@st.composite
def reductions(draw, dtypes=Dtypes):
    """A tensor, and one of its dims."""
    x = draw(tensors(dtypes=dtypes))
    return x, draw(st.integers(0, x.ndim - 1))


@given(case=reductions(), keep=st.booleans(), ranks=Ranks, seed=Seeds)
def test_a_sum_turns_the_shards_of_its_dim_into_parts_and_keeps_the_others(case, keep, ranks, seed):
    x, dim = case
    one = sample("sum.dim_IntList", x, [dim], keep)
    assert evidence(one, f"S({dim}) -> P(sum)", ranks, seed) is None
    assert evidence(one, "P(sum) -> P(sum)", ranks, seed) is None
    for other in set(range(x.ndim)) - {dim}:
        left = other if keep or other < dim else other - 1
        assert evidence(one, f"S({other}) -> S({left})", ranks, seed) is None


@given(case=reductions(), ranks=Ranks, seed=Seeds)
def test_a_maximum_of_maxima_is_the_maximum_and_an_empty_shard_has_none(case, ranks, seed):
    x, dim = case
    found = evidence(sample("amax.default", x, [dim]), f"S({dim}) -> P(max)", ranks, seed)
    if -(-x.shape[dim] // ranks) * (ranks - 1) < x.shape[dim]:
        assert found is None
    else:
        assert "raises IndexError" in found.reason


@given(case=reductions(st.just(torch.float64)), ranks=Ranks, seed=Seeds)
def test_a_mean_of_means_is_the_mean_of_even_shards_alone(case, ranks, seed):
    x, dim = case
    found = evidence(sample("mean.dim", x, [dim]), f"S({dim}) -> P(avg)", ranks, seed)
    assert (found is None) == (x.shape[dim] % ranks == 0)


@given(
    rows=st.integers(1, 5), inner=st.integers(1, 5), columns=st.integers(1, 5), dtype=Dtypes, ranks=Ranks, seed=Seeds
)
def test_a_product_of_matrices_is_linear_in_both(rows, inner, columns, dtype, ranks, seed):
    one = sample(
        "mm.default", numbers(rows, inner, dtype=dtype, seed=seed), numbers(inner, columns, dtype=dtype, seed=seed + 1)
    )
    for line in (
        "S(0), R -> S(0)",
        "R, S(1) -> S(1)",
        "S(1), S(0) -> P(sum)",
        "P(sum), R -> P(sum)",
        "R, P(sum) -> P(sum)",
    ):
        assert evidence(one, line, ranks, seed) is None


@given(x=tensors(), ranks=Ranks, seed=Seeds)
def test_parts_of_a_sum_are_not_parts_of_its_absolute_value(x, ranks, seed):
    """The probe can say no: of enough elements some change sign."""
    assume(x.numel() >= 4 and x.abs().sum() > 0)
    assert evidence(sample("abs.default", x), "P(sum) -> P(sum)", ranks, seed) is not None


# The slow twin.


def nest(x):
    """A tensor as (shape, dict from index to number)."""
    return tuple(x.shape), {index: x[index].item() for index in itertools.product(*map(range, x.shape))}


def piece_of(shape, placement, ranks, rank):
    """The indices of the whole that a rank's shard has, each with its index there."""
    step = math.ceil(shape[placement.dim] / ranks)
    rows = range(shape[placement.dim])[rank * step : (rank + 1) * step]
    for index in itertools.product(*map(range, shape)):
        if index[placement.dim] in rows:
            place = list(index)
            place[placement.dim] -= rows[0]
            yield index, tuple(place)


def rows_of(size, ranks, rank):
    step = math.ceil(size / ranks)
    return len(range(size)[rank * step : (rank + 1) * step])


FOLDS = {"sum": sum, "avg": lambda held: sum(held) / len(held), "min": min, "max": max, "product": math.prod}


def near(a, b, scale):
    return a == b or (isinstance(a + b, float) and abs(a - b) <= 1e-9 * scale)


def twin_says(held, placement, want):
    """Whether these local tensors make `want` under a placement, element by element."""
    shape, oracle = nest(want)
    local = [nest(h) for h in held]
    sizes = [abs(v) for _, values in local for v in values.values()] + [abs(v) for v in oracle.values()]
    scale = max(sizes, default=0.0)
    ranks = len(held)
    if isinstance(placement, Shard):
        if placement.dim >= len(shape):
            return False
        for rank, (got, values) in enumerate(local):
            asked = list(shape)
            asked[placement.dim] = rows_of(shape[placement.dim], ranks, rank)
            if got != tuple(asked):
                return False
            if not all(near(values[place], oracle[i], scale) for i, place in piece_of(shape, placement, ranks, rank)):
                return False
        return True
    if any(got != shape for got, _ in local):
        return False
    if isinstance(placement, Replicate):
        return all(near(values[i], oracle[i], scale) for _, values in local for i in oracle)
    fold = FOLDS[placement.reduce_op]
    return all(near(fold([values[i] for _, values in local]), oracle[i], scale) for i in oracle)


OPS = (
    ("neg.default", ()), ("relu.default", ()), ("cumsum.default", (0,)), ("sum.dim_IntList", ([0],)),
    ("sum.dim_IntList", ([0], True)), ("amax.default", ([-1],)), ("flip.default", ([0],)), ("sum.default", ()),
)  # fmt: skip


@st.composite
def questions(draw):
    """A call of one tensor, an input placement, and an output placement that may or may not hold."""
    x = draw(tensors())
    op, args = draw(st.sampled_from(OPS))
    one = sample(op, x, *args)
    kinds = [
        f"P({kind})"
        for kind in PARTIAL_KINDS
        if is_reducible(kind, x.dtype) and (kind != "avg" or x.dtype.is_floating_point)
    ]
    given_ones = ["R", *(f"S({dim})" for dim in range(x.ndim)), *kinds]
    made = ["R", *(f"S({dim})" for dim in range(x.ndim + 1)), *kinds]
    return one, draw(st.sampled_from(given_ones)), draw(st.sampled_from(made))


@given(question=questions(), ranks=Ranks, seed=Seeds)
def test_the_probe_agrees_with_its_slow_twin(question, ranks, seed):
    one, given_one, made = question
    probe, (x,) = Probe(one, run_oracle(one), ranks, seed=seed), one.tensors
    want = one.call([x])
    draws = probe.draws([parse(given_one)])
    try:
        held = [[one.call([piece]) for piece in pieces_by_loops(probe, x, given_one, ranks, draw)] for draw in draws]
    except IndexError:  # the maximum of an empty shard
        held = []
    twin = bool(held) and all(twin_says(h, parse(made), want) for h in held)
    assert (evidence(one, f"{given_one} -> {made}", ranks, seed) is None) == twin


def pieces_by_loops(probe, x, placement, ranks, draw):
    """Shards are cut here; parts are random, so they are the probe's own, once they add up."""
    asked = parse(placement)
    if isinstance(asked, Partial):
        held = list(probe.held(0, asked, draw))
        assert twin_says(held, asked, x), f"the parts of {placement} do not make the whole"
        return held
    if isinstance(asked, Replicate):
        return [x] * ranks
    made = []
    for rank in range(ranks):
        shape = list(x.shape)
        shape[asked.dim] = rows_of(x.shape[asked.dim], ranks, rank)
        local = torch.empty(shape, dtype=x.dtype)
        for index, place in piece_of(tuple(x.shape), asked, ranks, rank):
            local[place] = x[index]
        made.append(local)
    return made


@given(question=questions(), ranks=st.integers(2, 3), seed=Seeds)
def test_a_search_finds_what_a_validation_lets_stand(question, ranks, seed):
    one, given_one, _ = question
    probe, inputs = Probe(one, run_oracle(one), ranks, seed=seed), [parse(given_one)]
    found = probe.placements(inputs, 0, probe.draws(inputs))
    want = run_oracle(one).outputs[0]
    every = ["R", *(f"S({dim})" for dim in range(want.ndim)), *(f"P({kind})" for kind in PARTIAL_KINDS[:4])]
    holds = [p for p in every if evidence(one, f"{given_one} -> {p}", ranks, seed) is None]
    assert shorts(found).split(", ") == (["R"] if "R" in holds else holds or [""])
    assert all(short(p) != "P(product)" for p in found)
