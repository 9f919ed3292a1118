"""Redistributions without an op: from everywhere to everywhere that a user may ask for."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.shards import has_one_meaning
from localtensor.layout.spec import shard_cut
from strategies.model.rule import read_layout
from strategies.programs.mesh_programs import SHAPES, draw_redistributions
from strategies.programs.run import follow_ups
from strategies.programs.run.real_run import run_simulated_programs
from tests.strategies.programs_of import described

MESHES = [(2, 2), (2, 3), (2, 2, 2)]


def target_of(program):
    return read_layout(program.then.removeprefix("to "))


@pytest.mark.parametrize("mesh", MESHES)
def test_source_and_target_have_a_meaning_and_differ(mesh):
    found = draw_redistributions(mesh, seed=0, budget=50)
    assert len(found) >= 40
    for program in found:
        ((x,), (source,)) = program.sample.tensors, program.inputs
        assert all(has_one_meaning(layout, x.shape, x.dtype, mesh) for layout in (source, target_of(program)))
        assert source != target_of(program)
        assert not any(isinstance(p, Partial) for p in target_of(program))


def test_every_form_of_source_and_target_comes():
    found = draw_redistributions((2, 3), seed=0, budget=80)
    sources, targets = [p.inputs[0] for p in found], [target_of(p) for p in found]
    for layouts in (sources, targets):
        assert any((shard_cut(p) or (0, 0))[1] > 1 for layout in layouts for p in layout)  # another order of cuts
        assert any(layout[0] == layout[1] != Replicate() for layout in layouts)  # nested
        assert any(Replicate() in layout for layout in layouts)
    assert any(isinstance(p, Partial) for layout in sources for p in layout)
    assert {tuple(p.sample.tensors[0].shape) for p in found} == set(SHAPES)
    assert {p.flattened for p in found} == {True, False}


def test_a_seed_draws_the_same_and_the_budget_is_kept():
    lines = [list(map(described, draw_redistributions((2, 2), seed=seed, budget=20))) for seed in (3, 3, 4)]
    assert lines[0] == lines[1] != lines[2]
    assert len(lines[0]) <= 20 and draw_redistributions((2, 2), seed=3, budget=0) == []


@pytest.mark.parametrize("mesh", MESHES)
def test_without_a_flattened_submesh_all_come_out_right(mesh, monkeypatch):
    plain = [p for p in draw_redistributions(mesh, seed=1, budget=30) if not p.flattened]
    plain = [p for p in plain if all(type(q) in (Replicate, Shard) for q in target_of(p))]
    for program in plain:
        names = ", ".join("Replicate()" if p == Replicate() else f"Shard({p.dim})" for p in target_of(program))
        text = f"x.redistribute(placements=[{names}]) if hasattr(x, 'device_mesh') else x"
        monkeypatch.setitem(follow_ups.RESULT_STEPS, program.then, text)
    heard = run_simulated_programs(plain)
    assert len(plain) > 8
    assert [described(p) + c.wrong for p, c in zip(plain, heard, strict=True) if c.wrong] == []
    assert {c.note for c in heard if "avg" not in c.note} == {"DTensor's own run is right"}
