"""Planted wrong rules: the planting itself is checked by hand, and a fixed few are put before the probe.

`make bench` judges all of them, and confirms them on real processes.
"""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.rules import Sample, call_of, overload
from strategies.trial import Docket, hear
from tests.bench import planted
from tests.bench.by_hand import shares, together, wrong
from tests.bench.claims import Base, Row, row
from tests.bench.mutations import Mutant, Spared, changed
from tests.bench.ops import BASES

ROOT = Path(__file__).parents[2]
KINDS = ("sum", "avg", "min", "max", "product")
BY_NAME = {base.name: base for base in BASES}


def few(names):
    """Ten of them, spread evenly over the ops."""
    names = sorted(names)
    return names[:: len(names) // 10][:10]


def heard(op):
    target = overload(op)
    made = (call_of(target, args, kwargs) for args, kwargs in planted.samples(target))
    return hear(Docket(op, tuple(Sample(call, tuple(tensors), "planted") for call, tensors in made), (2, 3, 4), 0), int)


@pytest.mark.parametrize("op", few(planted.MUTANTS))
def test_the_probe_kills_a_mutant(op):
    hearing = heard(op)
    assert list(hearing.suspects) == [f"{op}: {planted.row_of(op)}"], planted.MUTANTS[op]


@pytest.mark.parametrize("op", few(planted.ORIGINALS))
def test_the_probe_finds_an_original_sound(op):
    hearing = heard(op)
    assert f"{op}: {planted.row_of(op)}" in hearing.sound
    assert not hearing.suspects and not hearing.crashed and not hearing.skipped


@pytest.mark.parametrize("name", BY_NAME)
def test_by_hand_every_original_is_right_and_every_mutant_wrong(name):
    base = BY_NAME[name]
    assert {str(r): wrong(base, r) for r in base.rows()} == {str(r): "" for r in base.rows()}
    made = [mutant for _, mutant in changed(base)]
    assert [str(m.row) for m in made if isinstance(m, Mutant) and not wrong(base, m.row)] == []
    assert [(str(s.row), s.reason) for s in made if isinstance(s, Spared) and wrong(base, s.row)] == []


def choices(letters, partial):
    return [Replicate(), *(Shard(dim) for dim in range(len(letters))), *(Partial(kind) for kind in KINDS if partial)]


@pytest.mark.parametrize("name", [b.name for b in BASES if len(b.results) == 1 and len(b.dims) < 3 and not b.boolean])
def test_what_is_stated_of_an_op_is_all_that_is_right(name):
    base = BY_NAME[name]
    inputs = [i for i in product(*map(choices, base.dims, base.reals)) if any(not isinstance(p, Replicate) for p in i)]
    rows = [Row(i, (output,)) for i in inputs for output in choices(base.outs, True)]
    assert {str(r) for r in rows if not wrong(base, r)} == set(base.reasons())


def test_there_is_enough_to_be_fooled_by():
    assert len(BASES) >= 20 and len(planted.ORIGINALS) >= 40 and len(planted.MUTANTS) >= 120
    assert {planted.base_of(op).name for op in planted.MUTANTS} >= {base.name for base in BASES if base.rows()}
    assert all("->" in words and ":" in words for words in planted.MUTANTS.values())


def test_a_fresh_process_plants_the_same_ops_in_the_same_order():
    said = "from tests.bench import planted as p; print(*sorted(p.ORIGINALS), *p.MUTANTS, *p.MISFITS)"
    done = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*sorted(planted.ORIGINALS), *planted.MUTANTS, *planted.MISFITS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_by_hand_make_the_whole(kind, ranks):
    x = torch.linspace(-3, 4, 15, dtype=torch.float64).reshape(3, 5)
    held = shares(x, kind, ranks, torch.Generator().manual_seed(ranks))
    (got,) = together(held, Partial(kind))
    assert len(held) == ranks and not any(torch.equal(piece, x) for piece in held)
    torch.testing.assert_close(got, x)


def test_by_hand_a_wrong_row_is_told_from_a_right_one():
    doubled = Base("doubled", "ab", "ab", lambda x: 2 * x, along="ab")
    assert wrong(doubled, row("S(0) -> S(0)")) == ""
    assert wrong(doubled, row("S(0) -> S(1)")).startswith("shapes [(4, 8), (3, 8)] on 2 ranks are not")
    assert wrong(doubled, row("P(sum) -> P(max)")) == "2 ranks make other values than the op"
    added = Base("added", "ab,ab", "ab", torch.add, along="ab")
    assert wrong(added, row("S(0), R -> S(0)")).startswith("rank 0 of 2 refuses: The size of tensor a")
