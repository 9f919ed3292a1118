"""Planted wrong rules: the planting itself is checked by hand, and a fixed few are put before the probe.

`make bench` judges all of them, and confirms them on real processes.
"""

import json
import sys
from itertools import product
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import localtensor as lt
from strategies.model.rule import Sample, call_of, overload
from strategies.validation.finding import OverloadTask
from strategies.validation.overload import validate_overload
from tests.tools import warm
from tests.tools.bench import cached, sizes
from tests.tools.bench.by_hand import shares, together, wrong, wrong_elsewhere
from tests.tools.bench.claims import Base, Row, row
from tests.tools.bench.families import BASES, FAMILIES, FAMILY_OF
from tests.tools.bench.mutations import Mutant, Spared, changed, chosen
from tests.tools.bench.ops_varied import VARIED

ROOT = Path(__file__).parents[3]
KINDS = ("sum", "avg", "min", "max", "product")
STATED = ("pointwise", "reductions", "scans", "products", "movers")
"""Families of whose small ops all that is right is stated, with its reason."""
OLD = [base for family in STATED for base in FAMILIES[family]]
SUSPECTS, SOUND = attrgetter("suspects"), attrgetter("sound")
BY_NAME = {base.name: base for base in BASES}


def thirds(values):
    """Parameters of which every third is tried by default: ops of one family are much alike."""
    return [pytest.param(v, marks=[] if n % 3 == 0 else pytest.mark.slow) for n, v in enumerate(values)]


@pytest.fixture(scope="module")
def planted():
    """Importing it plants hundreds of ops: seconds that collecting these tests need not take."""
    from tests.tools.bench import planted

    return planted


FEW = pytest.mark.parametrize("turn", range(0, len({*FAMILY_OF.values()}), 4))


def one_of(planted, names, turn):
    """The op of the family in this place, another of its ops each time."""
    by_family = {}
    for op in sorted(names):
        by_family.setdefault(FAMILY_OF[planted.name_of(op)], []).append(op)
    ops = by_family[[*by_family][turn]]
    return ops[turn // 4 % len(ops)]


def validated(planted, op):
    """The rules suspected on 2, 3 or 4 ranks, and those that are sound; whatever else happened is a failure."""
    target = overload(op)
    made = (call_of(target, args, kwargs) for args, kwargs in planted.samples(target))
    samples = tuple(Sample(call, tuple(tensors), "samples() #0") for call, tensors in made)
    unit_results = validate_overload(OverloadTask(op, samples, ((2,), (3,), (4,)), 0), lambda number: None)
    assert not any(h.crashed or h.skipped for h in unit_results)
    rules = [{name.removeprefix(f"{op}: ") for h in unit_results for name in kept(h)} for kept in (SUSPECTS, SOUND)]
    return rules[0], rules[1] - rules[0]


@pytest.mark.few(3)
@FEW
def test_the_probe_kills_a_mutant(planted, turn):
    op = one_of(planted, planted.MUTANTS, turn)
    suspects, _ = validated(planted, op)
    assert suspects == {row for row, right in planted.rows_of(op).items() if not right}, planted.MUTANTS[op]


@pytest.mark.few(4)
@FEW
def test_the_probe_finds_an_original_sound(planted, turn):
    op = one_of(planted, planted.ORIGINALS, turn)
    suspects, sound = validated(planted, op)
    assert not suspects and {*planted.rows_of(op)} <= sound


@pytest.mark.parametrize("family", thirds(FAMILIES))
def test_by_hand_every_original_is_right_and_every_mutant_wrong(family):
    for turn, base in enumerate(FAMILIES[family]):
        assert {str(r): wrong(base, r) for r in base.rows()} == {str(r): "" for r in base.rows()}
        made = chosen(base, turn)
        assert [str(m.row) for m in made if not wrong(base, m.row) and not wrong_elsewhere(base, m.row)] == []


@pytest.mark.parametrize("name", ["cumsum_dim1", "transpose", "max_dim1", "accumulate_", "foreach_mixed", "greater"])
def test_what_no_brute_force_tells_from_a_right_row_is_no_mutant(name):
    made = [mutant for _, mutant in changed(BY_NAME[name])]
    assert [str(m.row) for m in made if isinstance(m, Mutant) and not wrong(m.base, m.row)] == []
    assert [(str(s.row), s.reason) for s in made if isinstance(s, Spared) and not s.reason] == []


@pytest.mark.parametrize("varied", VARIED, ids=lambda varied: varied.name)
def test_by_hand_each_call_is_right_and_each_mistake_about_it_wrong(varied):
    assert varied.wrong() == {}
    assert [mistake.words for mistake in varied.mistakes if not varied.wrong(mistake)] == []
    assert len({base.schema() for base in varied.calls}) == 1


@pytest.mark.parametrize(("name", "text", "form"), [("tied", "S(1) -> S(1)", "ties"), ("filled", "S(0) -> S(0)", "ties"),
    ("saturated", "P(sum) -> P(sum)", "large"), ("poisoned", "S(0) -> S(0)", "not finite")])  # fmt: skip
def test_a_row_that_only_a_rare_value_betrays(name, text, form):
    assert wrong(BY_NAME[name], row(text)) == ""
    assert wrong_elsewhere(BY_NAME[name], row(text)).startswith(f"{form}: ")


def choices(letters, partial):
    return [Replicate(), *(Shard(dim) for dim in range(len(letters))), *(Partial(kind) for kind in KINDS if partial)]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "name", thirds(b.name for b in OLD if len(b.results) == 1 and len(b.dims) < 3 and not b.boolean)
)
def test_what_is_stated_of_an_op_is_all_that_is_right(name):
    base = BY_NAME[name]
    inputs = [i for i in product(*map(choices, base.dims, base.reals)) if any(not isinstance(p, Replicate) for p in i)]
    rows = [Row(i, (output,)) for i in inputs for output in choices(base.outs, True)]
    assert {str(r) for r in rows if not wrong(base, r)} == set(base.reasons())


def test_there_is_enough_of_every_family_to_be_fooled_by(planted):
    assert len(planted.ORIGINALS) >= 300 and len(planted.MUTANTS) >= 600 and planted.MISFITS
    assert {planted.name_of(op) for op in planted.MUTANTS} == {one.name for one in (*BASES, *VARIED)}
    assert min(len(bases) for bases in FAMILIES.values()) >= 2
    assert all(":" in words for words in planted.MUTANTS.values())


@pytest.mark.slow
def test_a_fresh_process_plants_the_same_ops_in_the_same_order(planted):
    said = "from tests.tools.bench import planted as p; print(*sorted(p.ORIGINALS), *p.MUTANTS, *p.MISFITS)"
    done = warm.run([sys.executable, "-c", said], cwd=ROOT, check=True)
    assert done.stdout.split() == [*sorted(planted.ORIGINALS), *planted.MUTANTS, *planted.MISFITS]


def test_a_scalar_left_out_of_the_key_of_dtensors_cache_makes_the_second_call_wrong():
    cached.planted()
    found = lt.run(cached.job, ranks=2)[0]
    assert len(found) == 2 * len(cached.CACHED)
    assert {op for op, wrong in found.items() if wrong} == {op for op in found if "forgets" in op}


@pytest.mark.parametrize(
    ("sample", "count"), [("f64[4,2]", 8), (["f64[]", "i64[3]", "dim=[1, 2]"], 4), ("[bf16[2,2], f32[0]]", 4)]
)
def test_the_elements_of_a_finding_are_read_from_its_sample(sample, count):
    assert sizes.elements(sample) == count


def test_the_medians_of_a_report(tmp_path):
    shown = [{"verdict": "unsound", "mesh": [2], "sample": ["f64[4,2]"]}, {"verdict": "unsound", "mesh": [2, 3], "sample": ["f64[2]"]},
             {"verdict": "suspect", "mesh": "(2,)", "sample": ["f64[20]", "dim=0"]}]  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps({"findings": shown}))
    suspect, unsound, both = sizes.sizes(tmp_path / "report.json")
    assert (suspect.ranks, suspect.elements) == (2, 20) and (unsound.ranks, unsound.elements) == (4, 5)
    assert (both.findings, both.ranks, both.elements, both.most_elements) == (3, 2, 8, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_by_hand_make_the_whole(kind, ranks):
    x = torch.linspace(-3, 4, 15, dtype=torch.float64).reshape(3, 5)
    held = shares(x, kind, ranks, torch.Generator().manual_seed(ranks))
    (got,) = together(held, Partial(kind))
    assert len(held) == ranks and not any(torch.equal(piece, x) for piece in held)
    torch.testing.assert_close(got, x)


def test_by_hand_a_wrong_row_is_distinguished_from_a_right_one():
    doubled = Base("doubled", "ab", "ab", lambda x: 2 * x, along="ab")
    assert wrong(doubled, row("S(0) -> S(0)")) == ""
    assert wrong(doubled, row("S(0) -> S(1)")).startswith("shapes [(4, 8), (3, 8)] on 2 ranks are not")
    assert wrong(doubled, row("P(sum) -> P(max)")) == "2 ranks make other values than the op"
    added = Base("added", "ab,ab", "ab", torch.add, along="ab")
    assert wrong(added, row("S(0), R -> S(0)")).startswith("rank 0 of 2 refuses: The size of tensor a")
