"""Which test files belong to a module: those that bear its name; else those that name it most often."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.tools.mutants.values import ROOT

MOST = 3
"""A module that no test file is named after has the tests that name it most often, so many of them."""
SEEN_FROM = {
    "strategies/sweep/confirmation.py": "strategies/cli/test_validate_source",
    "strategies/validation/sources/module_samples.py": "strategies/validation/sources/test_local_map",
    "strategies/validation/sources/spmd_types/rank_group.py": "strategies/validation/sources/test_spmd_collectives",
    "strategies/programs/run/step_functions.py": "test_follow_ups test_follow_ups_gradients",
    **dict.fromkeys((f"strategies/programs/public_api/{name}.py" for name in
        ["tensor_calls", "module_calls", "tensor_steps", "module_steps"]), "strategies/programs/public_api/test_drawing"),
    **dict.fromkeys((f"strategies/programs/public_api/{name}.py" for name in
        ["optimizer_calls", "optimizer_steps", "varied_calls", "varied_steps"]), "strategies/programs/public_api/test_varied"),
    **dict.fromkeys((f"strategies/programs/public_api/{name}.py" for name in
        ["python_calls", "python_steps", "function_calls", "function_steps", "submesh_steps"]), "strategies/programs/public_api/test_everyday"),
    "strategies/sweep/causes/pages.py": "strategies/sweep/causes/test_script end_to_end/test_bench_findings",
    "strategies/ops/pointwise/monotone.py": "test_linear_unary_binary",
    "localtensor/processes/worker_group.py": "test_pool test_forked",
    **dict.fromkeys((f"localtensor/collectives/trace/{name}.py" for name in ["lane", "module_spans", "op_traits", "op_watch", "memory", "events"]),
        "test_recorder test_chrome"),
    **dict.fromkeys((f"localtensor/runner/trace/{name}.py" for name in ["page", "summary", "tables"]),
        "test_files"),
    "localtensor/processes/job.py": "test_pool_run_runs test_forked",
    "localtensor/processes/worker.py": "test_pool test_forked test_forked_exception_transport",
    "localtensor/errors/base.py": (
        "localtensor/layout/test_shards localtensor/layout/test_spec localtensor/layout/test_shard_order"
    ),
    "localtensor/errors/collectives.py": (
        "localtensor/collectives/test_argument_checks_refusals localtensor/layout/test_reductions"
    ),
    "localtensor/concurrency/explorer.py": "strategies/propagation/races/test_explore",
    "localtensor/concurrency/single_flight.py": "strategies/propagation/test_cache_cache_key",
    "localtensor/lockstep/dispatch/op_table.py": "test_op_table test_batching",
    "localtensor/_util/rank_output.py": "localtensor/runner/test_torchrun",
    "localtensor/lockstep/dispatch/batching_dims.py": "test_batching test_every_overload",
    "localtensor/lockstep/patches/branch_source.py": "localtensor/lockstep/patches/test_branches",
    "localtensor/lockstep/patches/branch_values.py": "localtensor/lockstep/patches/test_branches",
    "localtensor/lockstep/values/formatting.py": "localtensor/lockstep/patches/test_nn_modules test_rank_int",
    "localtensor/testing/hypothesis_strategies/values.py": "test_draws test_draws_values",
    "localtensor/testing/hypothesis_strategies/layouts.py": "test_draws test_draws_sharded",
    "localtensor/runner/torchrun_processes.py": "test_torchrun",
    "strategies/validation/assertions/script.py": "test_api",
    "strategies/validation/assertions/api.py": "test_api",
    "localtensor/lockstep/dispatch/execute.py": "test_batching test_op_table",
    "localtensor/lockstep/comms/stacked_collectives.py": "test_collectives",
    "localtensor/torch_suites/rank_run.py": "test_rank_run test_multi_process test_multi_threaded",
    "strategies/__main__.py": "strategies/cli/test_app strategies/base/test_signals",
    "strategies/planner/execute/step.py": "test_process_groups test_lockstep",
    **dict.fromkeys((f"strategies/planner/search/{name}.py" for name in ["plan_cache", "bound", "edges", "state_table"]),
        "test_edges test_api test_api_optimal"),
    "strategies/ops/all_rules.py": "strategies/ops/lib/test_overload_variants test_all_rules",
    "strategies/ops/pointwise/linear.py": "test_creation",
    "strategies/ops/pointwise/creation.py": "test_creation",
    "localtensor/layout/mesh.py": "test_spec",
    "strategies/model/codec.py": "strategies/programs/test_script strategies/programs/test_mesh_programs",
    "strategies/propagation/mesh_expansion.py": "test_propagator test_mesh_expansion",
    "strategies/ops/lib/elementwise.py": (
        "strategies/ops/nn/test_attention strategies/ops/nn/test_spatial_pooling strategies/ops/linalg/test_matrix_ops "
        "strategies/ops/linalg/test_matmul strategies/ops/linalg/test_reductions_rowwise"
    ),
    **dict.fromkeys((
            f"strategies/gate/changes/{name}.py"
            for name in (
                "index module_model project registrations roots changed_scopes changed_starts changed_tree version_view"
            ).split()
        ),
        "test_select test_version_view test_normal_form test_name_resolution test_dependency_slice"),
}  # fmt: skip
"""Modules that no test names, because they run in a process of their own or behind another module, or whose name is also
another module's: the tests that reach them, below tests/; a plain name is that of a test in the mirror of its folder."""
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
    """The test files of a module, and the module itself where its docstrings have examples."""
    module = Path(path)
    stem = module.stem.strip("_")
    own = [*_seen_from(path), *_mirrored(module.parent.as_posix(), stem)] or _naming(stem)
    examples = (path,) if ">>> " in (ROOT / path).read_text() else ()
    return examples + tuple(dict.fromkeys(own))


def _seen_from(path: str) -> list[str]:
    folder = Path(path).parent
    names = [name if "/" in name else f"{folder}/{name}" for name in SEEN_FROM.get(path, "").split()]
    return [f"tests/{name}.py" for name in names]


def _mirrored(folder: str, stem: str) -> list[str]:
    """tests/FOLDER/test_STEM.py first, then tests/FOLDER/test_STEM_*.py."""
    own = [name for name in test_files() if re.fullmatch(rf"tests/{folder}/test_{stem}(_\w+)?\.py", name)]
    return sorted(own, key=lambda name: (Path(name).stem != f"test_{stem}", name))


def _naming(stem: str) -> list[str]:
    """The tests that name a module most often."""
    counted = {name: words[stem] for name, words in test_files().items() if words[stem]}
    return sorted(counted, key=lambda name: -counted[name])[:MOST]


def modules(asked: list[str]) -> list[str]:
    """The source files that were asked for, by path, by folder or by module; all of them if nothing was.

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
            raise ValueError(
                f"no module {name!r}: give a file, a folder, or a module such as localtensor.layout.shards"
            )
        chosen += found
    return chosen
