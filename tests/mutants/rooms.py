"""Which test files belong to a room: those that bear its name; else those that name it most often."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.mutants.former import FORMER
from tests.mutants.values import ROOT

MOST = 3
"""A room that no test file is named after has the tests that name it most often, so many of them."""
SEEN_FROM = {
    "localtensor/processes/worker_group.py": (
        "tests/localtensor/test_processes.py",
        "tests/localtensor/test_forked.py",
    ),
    "localtensor/processes/job.py": (
        "tests/localtensor/test_real_runs.py",
        "tests/localtensor/test_forked.py",
    ),
    "localtensor/processes/worker.py": (
        "tests/localtensor/test_processes.py",
        "tests/localtensor/test_forked.py",
        "tests/localtensor/test_forked_errors.py",
    ),
    "localtensor/errors/base.py": (
        "tests/localtensor/test_shards.py",
        "tests/localtensor/test_placement.py",
        "tests/localtensor/test_orders.py",
    ),
    "localtensor/errors/collectives.py": (
        "tests/localtensor/test_agreement.py",
        "tests/localtensor/test_reductions.py",
    ),
    "localtensor/concurrency/results.py": (
        "tests/localtensor/test_explore.py",
        "tests/localtensor/test_explore_lines.py",
        "tests/strategies/test_races.py",
    ),
    "localtensor/lockstep/dispatch/op_table.py": (
        "tests/localtensor/test_ways.py",
        "tests/localtensor/test_physical.py",
    ),
    "localtensor/_util/rank_output.py": ("tests/localtensor/test_script.py",),
    "localtensor/lockstep/dispatch/batching_dims.py": (
        "tests/localtensor/test_physical.py",
        "tests/localtensor/test_every_overload.py",
    ),
    "localtensor/lockstep/values/formatting.py": (
        "tests/localtensor/test_lockstep_modules.py",
        "tests/localtensor/test_rank_ints.py",
    ),
    "localtensor/testing/hypothesis_strategies/values.py": (
        "tests/localtensor/test_testing_draws.py",
        "tests/localtensor/test_testing_draws_parts.py",
    ),
    "localtensor/testing/hypothesis_strategies/layouts.py": (
        "tests/localtensor/test_testing_draws.py",
        "tests/localtensor/test_testing_draws_sharded.py",
    ),
    "localtensor/testing/programs/program.py": ("tests/localtensor/test_testing_programs.py",),
    "localtensor/runner/torchrun_processes.py": ("tests/localtensor/test_script.py",),
    "strategies/model/code_text.py": ("tests/strategies/test_repro.py",),
    "strategies/validation/difference.py": ("tests/strategies/test_probe.py",),
    "strategies/validation/assertions/script.py": ("tests/localtensor/test_testing_rule_tests.py",),
    "strategies/validation/assertions/api.py": ("tests/localtensor/test_testing_rule_tests.py",),
    "localtensor/lockstep/dispatch/execute.py": (
        "tests/localtensor/test_physical.py",
        "tests/localtensor/test_ways.py",
    ),
    "localtensor/lockstep/comms/stacked_collectives.py": ("tests/localtensor/test_exchange.py",),
    "localtensor/torch_suites/rank_run.py": (
        "tests/suites/test_suites_ranks.py",
        "tests/suites/test_suites_processes.py",
        "tests/suites/test_suites_threads.py",
    ),
    "strategies/__main__.py": ("tests/strategies/test_cli.py", "tests/strategies/test_stopping.py"),
    "strategies/planner/execute/step.py": ("tests/plans/test_plan_ranks.py", "tests/plans/test_plan_lockstep.py"),
    **dict.fromkeys(
        (f"strategies/planner/search/{name}.py" for name in ["astar", "bound", "edges", "state_table"]),
        (
            "tests/plans/test_planner_bound.py",
            "tests/plans/test_planner.py",
            "tests/plans/test_planner_optimal.py",
        ),
    ),
    "strategies/ops/all_rules.py": ("tests/ops/test_variants.py", "tests/ops/test_collected.py"),
    "strategies/ops/pointwise/unary_binary.py": ("tests/ops/test_factory.py",),
    "strategies/ops/lib/elementwise.py": (
        "tests/ops/test_matmul.py",
        "tests/ops/test_softmax.py",
    ),
    "strategies/ops/pointwise/creation.py": ("tests/ops/test_factory.py",),
    "strategies/propagation/model.py": (
        "tests/strategies/test_propagate.py",
        "tests/strategies/test_expansion.py",
    ),
    "strategies/ops/lib/dim_maps.py": (
        "tests/ops/test_gates.py",
        "tests/ops/test_pooling.py",
        "tests/ops/test_linalg.py",
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
            "tests/strategies/test_changed.py",
            "tests/strategies/test_changed_digest.py",
            "tests/strategies/test_changed_form.py",
            "tests/strategies/test_changed_names.py",
            "tests/strategies/test_changed_slice.py",
        ),
    ),
}
"""Rooms that no test names, because they run in a process of their own or behind another room, or whose name is also
another room's: the tests that reach them."""
SLOW = ("tests/real", "tests/browser", "tests/cuda", "tests/bench", "tests/mutants", "tests/house")


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
    own = list(SEEN_FROM.get(path, ()))
    for former in () if own else FORMER.get(path, (path,)):
        named = Path(former)
        stem, folder = named.stem.lstrip("_"), named.parent.name
        if stem == "main__":
            stem = folder
        own += _named(f"{folder}_{stem}") or _named(stem) or _naming(stem) or _family(stem) or _naming(Path(path).stem)
    examples = (path,) if ">>> " in (ROOT / path).read_text() else ()
    return examples + tuple(dict.fromkeys(own))


def _named(stem: str) -> list[str]:
    """test_X.py first, then test_X_*.py."""
    own = [name for name in test_files() if re.fullmatch(rf"test_{stem}(_\w+)?\.py", Path(name).name)]
    return sorted(own, key=lambda name: (Path(name).stem != f"test_{stem}", name))


def _naming(stem: str) -> list[str]:
    """The tests that name a room most often."""
    counted = {name: words[stem] for name, words in test_files().items() if words[stem]}
    return sorted(counted, key=lambda name: -counted[name])[:MOST]


def _family(stem: str) -> list[str]:
    """`once_cells` has the tests of `once`: the first of them, by name."""
    while "_" in stem:
        stem = stem.rpartition("_")[0]
        if own := _named(stem):
            return own[:MOST]
    return []


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
