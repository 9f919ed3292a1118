"""Which test files belong to a room: those that bear its name; else those that name it most often."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.tools.mutants.values import ROOT

MOST = 3
"""A room that no test file is named after has the tests that name it most often, so many of them."""
SEEN_FROM = {
    "strategies/ops/pointwise/monotone.py": ("tests/strategies/ops/pointwise/test_unary_binary.py",),
    "localtensor/processes/worker_group.py": (
        "tests/localtensor/processes/test_pool.py",
        "tests/localtensor/processes/test_forked.py",
    ),
    "localtensor/processes/job.py": (
        "tests/localtensor/processes/test_pool_run_runs.py",
        "tests/localtensor/processes/test_forked.py",
    ),
    "localtensor/processes/worker.py": (
        "tests/localtensor/processes/test_pool.py",
        "tests/localtensor/processes/test_forked.py",
        "tests/localtensor/processes/test_forked_exception_transport.py",
    ),
    "localtensor/errors/base.py": (
        "tests/localtensor/layout/test_shards.py",
        "tests/localtensor/layout/test_spec.py",
        "tests/localtensor/layout/test_shard_order.py",
    ),
    "localtensor/errors/collectives.py": (
        "tests/localtensor/collectives/test_argument_checks_refusals.py",
        "tests/localtensor/layout/test_reductions.py",
    ),
    "localtensor/concurrency/results.py": (
        "tests/localtensor/concurrency/test_explorer.py",
        "tests/localtensor/concurrency/test_line_yield_points.py",
        "tests/strategies/propagation/races/test_explore.py",
    ),
    "localtensor/concurrency/single_flight.py": ("tests/strategies/propagation/test_cache_cache_key.py",),
    "localtensor/lockstep/dispatch/op_table.py": (
        "tests/localtensor/lockstep/dispatch/test_op_table.py",
        "tests/localtensor/lockstep/dispatch/test_batching.py",
    ),
    "localtensor/_util/rank_output.py": ("tests/localtensor/runner/test_torchrun.py",),
    "localtensor/lockstep/dispatch/batching_dims.py": (
        "tests/localtensor/lockstep/dispatch/test_batching.py",
        "tests/localtensor/lockstep/dispatch/test_every_overload.py",
    ),
    "localtensor/lockstep/values/formatting.py": (
        "tests/localtensor/lockstep/patches/test_nn_modules.py",
        "tests/localtensor/lockstep/values/test_rank_int.py",
    ),
    "localtensor/testing/hypothesis_strategies/values.py": (
        "tests/localtensor/testing/hypothesis_strategies/test_draws.py",
        "tests/localtensor/testing/hypothesis_strategies/test_draws_values.py",
    ),
    "localtensor/testing/hypothesis_strategies/layouts.py": (
        "tests/localtensor/testing/hypothesis_strategies/test_draws.py",
        "tests/localtensor/testing/hypothesis_strategies/test_draws_sharded.py",
    ),
    "localtensor/testing/programs/program.py": ("tests/localtensor/testing/programs/test_program.py",),
    "localtensor/runner/torchrun_processes.py": ("tests/localtensor/runner/test_torchrun.py",),
    "strategies/validation/assertions/script.py": ("tests/strategies/validation/assertions/test_api.py",),
    "strategies/validation/assertions/api.py": ("tests/strategies/validation/assertions/test_api.py",),
    "localtensor/lockstep/dispatch/execute.py": (
        "tests/localtensor/lockstep/dispatch/test_batching.py",
        "tests/localtensor/lockstep/dispatch/test_op_table.py",
    ),
    "localtensor/lockstep/comms/stacked_collectives.py": ("tests/localtensor/lockstep/comms/test_collectives.py",),
    "localtensor/torch_suites/rank_run.py": (
        "tests/localtensor/torch_suites/test_rank_run.py",
        "tests/localtensor/torch_suites/test_multi_process.py",
        "tests/localtensor/torch_suites/test_multi_threaded.py",
    ),
    "strategies/__main__.py": ("tests/strategies/cli/test_app.py", "tests/strategies/base/test_signals.py"),
    "strategies/planner/execute/step.py": (
        "tests/strategies/planner/execute/test_process_groups.py",
        "tests/strategies/planner/execute/test_lockstep.py",
    ),
    **dict.fromkeys(
        (f"strategies/planner/search/{name}.py" for name in ["astar", "bound", "edges", "state_table"]),
        (
            "tests/strategies/planner/search/test_edges.py",
            "tests/strategies/planner/search/test_api.py",
            "tests/strategies/planner/search/test_api_optimal.py",
        ),
    ),
    "strategies/ops/all_rules.py": (
        "tests/strategies/ops/lib/test_overload_variants.py",
        "tests/strategies/ops/test_all_rules.py",
    ),
    "strategies/ops/pointwise/unary_binary.py": ("tests/strategies/ops/pointwise/test_creation.py",),
    "strategies/ops/lib/elementwise.py": (
        "tests/strategies/ops/linalg/test_matmul.py",
        "tests/strategies/ops/linalg/test_reductions_rowwise.py",
    ),
    "strategies/ops/pointwise/creation.py": ("tests/strategies/ops/pointwise/test_creation.py",),
    "strategies/propagation/model.py": (
        "tests/strategies/propagation/test_propagator.py",
        "tests/strategies/propagation/test_mesh_expansion.py",
    ),
    "strategies/ops/lib/dim_maps.py": (
        "tests/strategies/ops/nn/test_attention.py",
        "tests/strategies/ops/nn/test_spatial_pooling.py",
        "tests/strategies/ops/linalg/test_matrix_ops.py",
    ),
    **dict.fromkeys(
        (
            f"strategies/gate/changes/{name}.py"
            for name in [
                "index",
                "module_model",
                "project",
                "registrations",
                "roots",
                "changed_scopes",
                "changed_starts",
                "changed_tree",
                "version_view",
            ]
        ),
        (
            "tests/strategies/gate/changes/test_select.py",
            "tests/strategies/gate/changes/test_version_view.py",
            "tests/strategies/gate/changes/test_normal_form.py",
            "tests/strategies/gate/changes/test_name_resolution.py",
            "tests/strategies/gate/changes/test_dependency_slice.py",
        ),
    ),
}
"""Rooms that no test names, because they run in a process of their own or behind another room, or whose name is also
another room's: the tests that reach them."""
SLOW = (
    "tests/real",
    "tests/end_to_end/browser",
    "tests/tools/cuda",
    "tests/tools/bench",
    "tests/tools/mutants",
    "tests/architecture",
    "tests/end_to_end/test_",
)


@cache
def test_files() -> dict[str, Counter[str]]:
    """Each test file that a mutant may be tried under, and how often it says which word."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = {p.relative_to(ROOT).as_posix(): p for p in files}
    words = re.compile(r"\w+")
    return {name: Counter(words.findall(path.read_text())) for name, path in names.items() if not name.startswith(SLOW)}


@cache
def tests_of(path: str) -> tuple[str, ...]:
    """The test files of a room, and the room itself where its docstrings have examples."""
    module = Path(path)
    stem = module.stem.strip("_")
    own = [*SEEN_FROM.get(path, ()), *_mirrored(module.parent.as_posix(), stem)] or _naming(stem)
    examples = (path,) if ">>> " in (ROOT / path).read_text() else ()
    return examples + tuple(dict.fromkeys(own))


def _mirrored(folder: str, stem: str) -> list[str]:
    """tests/FOLDER/test_STEM.py first, then tests/FOLDER/test_STEM_*.py."""
    own = [name for name in test_files() if re.fullmatch(rf"tests/{folder}/test_{stem}(_\w+)?\.py", name)]
    return sorted(own, key=lambda name: (Path(name).stem != f"test_{stem}", name))


def _naming(stem: str) -> list[str]:
    """The tests that name a room most often."""
    counted = {name: words[stem] for name, words in test_files().items() if words[stem]}
    return sorted(counted, key=lambda name: -counted[name])[:MOST]


def rooms(asked: list[str]) -> list[str]:
    """The source files that were asked for, by path, by folder or by room; all of them if nothing was.

    Raises ValueError for a name that is none.
    """
    every = sorted(
        p.relative_to(ROOT).as_posix()
        for package in ("localtensor", "strategies")
        for p in (ROOT / package).rglob("*.py")
        if p.name != "__init__.py"
    )
    if not asked:
        return every
    chosen: list[str] = []
    for name in asked:
        plain = name.removesuffix("/")
        found = [p for p in every if p == plain or p.startswith(plain + "/") or p[:-3].replace("/", ".") == plain]
        if not found:
            raise ValueError(f"no room {name!r}: give a file, a folder, or a module such as localtensor.layout.shards")
        chosen += found
    return chosen
