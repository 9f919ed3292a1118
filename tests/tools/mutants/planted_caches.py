"""Bugs planted by hand: caches that threads share, propagation."""

from __future__ import annotations

from tests.tools.mutants.values import Planted

CACHES = (
    Planted(
        "strategies/propagation/cache.py::_tensor_parts",
        "    if any(extra):",
        "    if not extra:",
        "a miss over two placements of a class of the user's own is explained by nothing at all",
    ),
    Planted(
        "localtensor/concurrency/single_flight.py::value_key",
        "        return _TRUE if value else _FALSE",
        "        return value",
        "x + True is answered as x + 1, in another dtype",
    ),
    Planted(
        "localtensor/concurrency/single_flight.py::value_key",
        "return (float, value) if value and not isnan(value) else (float, repr(value))",
        "return (float, value)",
        "-0.0 gets the answer of 0.0, and NaN is computed each time",
    ),
    Planted(
        "strategies/model/call_signature.py::spec_key",
        'text += f" by {spec.shard_order}"',
        'text += ""',
        "a tensor whose axes take other turns is answered as one from left to right",
        ("tests/strategies/propagation/test_cache_cache_key.py",),
    ),
    Planted(
        "strategies/propagation/propagator.py::Propagator.propagate",
        "known = (op, _default_dtype(), *map(id, [*specs, *args]))",
        "known = (op, *map(id, [*specs, *args]))",
        "after set_default_dtype the results still have the old dtype",
    ),
    Planted(
        "strategies/propagation/propagator.py::Propagator._remember",
        "same[known] = (found, *specs, *(",
        "same[known] = (found, *(",
        "specs that died leave their identity, and their answer, to others",
    ),
    Planted(
        "strategies/propagation/propagator.py::Propagator._looked_up",
        "if found.mesh is mesh or mesh is None or found.mesh == mesh:",
        "if found.mesh is mesh or mesh is None or found.mesh.sizes == mesh.sizes:",
        "an answer speaks of the axes of another mesh",
    ),
    Planted(
        "strategies/propagation/propagator.py::Propagator._looked_up",
        "if spec.mesh is not mesh and spec.mesh != mesh:",
        "if spec.mesh is not mesh and spec.mesh.sizes != mesh.sizes:",
        "two tensors on two meshes of the same sizes are taken for tensors on one",
    ),
    Planted(
        "strategies/propagation/overlay/call_plan.py::_key",
        "held, tuple(mesh.shape), torch.get_default_dtype()",
        "held, tuple(mesh.shape)",
        "after set_default_dtype an op under an overlay claims the old dtype",
    ),
    Planted(
        "strategies/propagation/overlay/call_plan.py::CallPlanner.ready",
        "self._ready.get((key, IdentityKey(mesh)), ",
        "self._ready.get(key, ",
        "results of one mesh come back on another of the same sizes",
        ("tests/strategies/propagation/overlay/test_call.py", "tests/strategies/propagation/overlay/test_context.py"),
    ),
    Planted(
        "strategies/propagation/overlay/call_plan.py::_key",
        "spec.tensor_meta, spec.shard_order)",
        "spec.tensor_meta)",
        "wrong rows in silence for a tensor whose axes take other turns",
    ),
    Planted(
        "strategies/gate/verdict_cache.py::VerdictCache._read",
        'body["name"] == name and body["sum"] == _hex(value)',
        'body["name"] == name',
        "a verdict that somebody has edited is believed",
    ),
    Planted(
        "strategies/gate/verdict_cache.py::VerdictCache._name",
        "if not content or not self.tool:",
        "if not content:",
        "a torch that is being worked on is answered with verdicts from before the edit",
    ),
    Planted(
        "strategies/gate/verdict_cache.py::lines_by_overload",
        "if op in whole and op not in tied",
        "if op in whole",
        "a verdict that was taken over from another overload is kept, and stays when that one changes",
    ),
    Planted(
        "localtensor/concurrency/single_flight.py::SingleFlightCache._answered",
        "            raise _own_copy(cell.error).with_traceback(cell.trace)",
        "            raise cell.error.with_traceback(cell.trace)",
        "two threads raise one exception, and each adds to the other's traceback",
    ),
    Planted(
        "localtensor/concurrency/single_flight.py::SingleFlightCache.after_fork",
        "if cell.state is not KEPT and cell.owner != me:",
        "if cell.state is not KEPT and cell.owner == me:",
        "a forked child waits for ever for a thread of its parent",
    ),
    Planted(
        "localtensor/concurrency/single_flight.py::SingleFlightCache.get",
        "                if cell.state is KEPT:\n                    cell.used = True\n",
        "                if cell.state is KEPT:\n",
        "what is asked for all the time is thrown out as soon as others fill the cache",
    ),
)

PROPAGATION = (
    Planted(
        "strategies/propagation/mesh_expansion.py::_Search.wrong",
        "        return self.mixed(beginning, line)",
        '        return ""',
        "one tensor is P(sum) on one axis and P(max) on another, and nobody knows which goes first",
    ),
    Planted(
        "strategies/propagation/mesh_expansion.py::_Search.wrong",
        "        for piece in beginning.pieces:\n            same =",
        "        for piece in beginning.pieces[:1]:\n            same =",
        "what is right for full pieces only is chosen where the last rank has fewer rows",
    ),
    Planted(
        "strategies/propagation/mesh_expansion.py::_Search.with_line",
        "seconds += math.fsum(step.seconds for step in more)",
        "seconds = math.fsum(step.seconds for step in more)",
        "the dearer of two ways is taken: only the last tensor's moves count",
    ),
    Planted(
        "strategies/propagation/mesh_expansion.py::_Search.wrong",
        "if not problem.movable and line.inputs[leaf] !=",
        "if problem.movable and line.inputs[leaf] !=",
        "an op in place writes to a copy, and the tensor itself stays as it was",
    ),
    Planted(
        "strategies/ops/semantics/local_call.py::representative_coordinates",
        "found |= {full, full + 1}",
        "found |= {full}",
        "empty pieces are never looked at: a maximum of no rows is chosen",
    ),
    Planted(
        "strategies/ops/semantics/local_call.py::checked_rule.offer",
        "        for line in found:\n            check_line(entry, line, query)\n",
        "",
        "a rule that names a dim which is not there ends in an IndexError somewhere else",
    ),
    Planted(
        "strategies/propagation/meta_run.py::no_caller_modes",
        "torch.autocast(device, enabled=False)",
        "torch.autocast(device, enabled=True)",
        "what was asked under autocast is remembered for those who ask without it",
    ),
    Planted(
        "strategies/propagation/overlay/call.py::_bring_back",
        "    mine.copy_(redistributed_piece(used, DTensorSpec(spec.mesh, now, tensor_meta=spec.tensor_meta), spec.placements))",
        "    mine.copy_(used)",
        "an in-place op leaves the whole value, or another rank's rows, in the tensor it wrote to",
    ),
)

PLANTED: tuple[Planted, ...] = (*CACHES, *PROPAGATION)
