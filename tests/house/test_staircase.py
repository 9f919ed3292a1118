"""Every file imports only from floors below its own.  The floors are the design: README, "Architecture"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = """
localtensor.errors.base localtensor.opinfo localtensor.events localtensor._policies localtensor._context localtensor.replaced localtensor.wire localtensor.rank_slots localtensor.overlap localtensor.cores localtensor.lines localtensor._worker localtensor._script_rank localtensor.folding localtensor.lockstep_parts localtensor.offsets localtensor.own_world localtensor.physical localtensor.fold_order localtensor.rank_fixtures localtensor.rank_hypothesis localtensor.rank_loops localtensor.testing.drawn_meshes localtensor.testing.programs_steps localtensor.explore_values localtensor.sync localtensor.tolerance
localtensor.errors.arguments localtensor.errors.collectives localtensor.errors.processes localtensor.errors.faults localtensor.frames localtensor.rank_random localtensor.rank_shared localtensor.cells localtensor.draws localtensor.physical_lists localtensor.physical_nn localtensor.rewrites localtensor.rank_comms localtensor.suites_stores localtensor.testing.programs_lines localtensor.testing.programs_referee localtensor.testing.programs_words localtensor.testing.rule_errors localtensor.errors.explorations localtensor.once_cells
localtensor.errors.mismatches localtensor.errors.programs localtensor.errors.runs localtensor.errors.lockstep localtensor.memory localtensor.physical_dims localtensor.shown localtensor.rank_places localtensor.rank_patches localtensor.rank_rules localtensor.suites_barrier localtensor.suites_exits localtensor.testing.programs_value localtensor.testing.rule_ops localtensor.once_explained
localtensor.errors localtensor.forms localtensor.forked_errors localtensor.rank_outcomes localtensor.rank_passed localtensor.rank_report localtensor.rank_special localtensor.testing.program_draws localtensor.testing.rule_truth localtensor.suites_libraries localtensor.explore_bounded localtensor.once
localtensor.mesh localtensor.schedule localtensor.limits localtensor.reductions localtensor._crew localtensor.families localtensor.items localtensor.rank_words localtensor.ways localtensor.rank_state localtensor.suites_told localtensor.propagation
localtensor.partials localtensor.placement localtensor.testing.schedules localtensor.baton localtensor.agreement localtensor.processes localtensor.script_processes localtensor.folded localtensor.rank_nodes localtensor.rank_environment localtensor.rank_marks localtensor.explore_stage
localtensor.shards localtensor.meetings localtensor.collectives localtensor.rank_ints localtensor.recipes localtensor.rank_program localtensor.testing.drawn_checks localtensor.testing.rule_text localtensor.explore_sync localtensor.row_runs
localtensor.exchange localtensor.messages localtensor.same localtensor.judging localtensor.kernels localtensor.lockstep_groups localtensor.layouts localtensor.testing.drawn_ops localtensor.testing.drawn_texts localtensor.testing.drawn_values localtensor.testing.rule_shapes localtensor.explore localtensor.explore_lines
localtensor.chunks localtensor.simulation localtensor.testing.same localtensor.c10d_ops localtensor.offers localtensor.tensor localtensor.testing.drawn_parts localtensor.testing.drawn_layouts localtensor.orders
localtensor.works localtensor.watch localtensor.store localtensor.worlds localtensor.answers localtensor.lockstep_works localtensor.outcomes localtensor.reshapes localtensor.testing.drawn_sharded localtensor.flattening
localtensor.process_group localtensor.stand_ins localtensor.one_cell localtensor.by_kind localtensor.testing.drawn_choices localtensor.testing.rule_case
localtensor.threads localtensor._job localtensor.engine localtensor.lockstep_doors localtensor.testing.draws localtensor.testing.rule_calls localtensor.testing.rule_script localtensor.testing.rule_search
localtensor.kinds localtensor.real localtensor.script localtensor.c10d localtensor.lockstep_mesh localtensor.lockstep_modules localtensor.lockstep_objects localtensor.uneven localtensor.suites_ranks localtensor.testing.rule_report
localtensor._run localtensor.adjoints localtensor.dtensor localtensor.lockstep_calls localtensor.forked localtensor.suites_processes localtensor.suites_threads
localtensor.lockstep localtensor.rank_tests localtensor.rank_world localtensor.suites_continuous localtensor.testing.rule_shardings
localtensor.lockstep_collectives localtensor.testing.reference localtensor.rank_told localtensor.suites_bases localtensor.testing.rule_tests
localtensor.pytest_plugin localtensor.testing.suites localtensor.torch_suites
localtensor.testing
localtensor
strategies.changed_module strategies.drawn strategies.either strategies.git_tree strategies.html_picture strategies.layouts strategies.meshed strategies.remembered strategies.rules strategies.workers strategies.ambient strategies.cost strategies.ops.pointwise_casts strategies.overlay_table strategies.propagate_errors strategies.races_scripts strategies.races_values strategies.races_world strategies.dtensor_specs strategies.plan_picture strategies.plan_rows strategies.plan_text_pieces strategies.dtensor_compared strategies.dtensor_transforms strategies.stopping strategies.undisturbed
strategies.files strategies.leaving strategies.progress strategies.arguments strategies.again strategies.book strategies.changed_scopes strategies.changed_tree strategies.choice strategies.codec strategies.cpu_kernels strategies.form strategies.gradients strategies.keys strategies.likeness strategies.programs strategies.propagation strategies.races_children strategies.races_history strategies.races_once strategies.races_shown strategies.sealed strategies.torch_dtensor strategies.units strategies.verdicts strategies.cost_check_torch strategies.plan_parts strategies.plan_picture_svg strategies.plan_picture_text strategies.plan_text_near strategies.dtensor_pairs strategies.dtensor_stage strategies.steps
strategies.journal strategies.gaps strategies.adversaries strategies.blame strategies.cache strategies.changed_names strategies.changed_project strategies.changed_registered strategies.edited strategies.followers strategies.forms_dims strategies.forms_indices strategies.forms_layout strategies.forms_scalars strategies.forms_sizes strategies.gate_values strategies.local_arguments strategies.mesh_draws strategies.modules strategies.most_used strategies.ops.dimwise strategies.ops.losses_reduced strategies.ops.matmul_linear strategies.ops.pointwise_shards strategies.ops.reductions_dims strategies.ops.shared_dims strategies.ops.variants strategies.output_metadata strategies.pieces strategies.population strategies.propagate_rules strategies.races strategies.report strategies.samples strategies.spool strategies.values strategies.plans strategies.dtensor_played strategies.plan_draws
strategies.html_map strategies.truth strategies.baseline strategies.changed_form strategies.changed_starts strategies.coverage strategies.decomposed strategies.expansion strategies.ops.attention strategies.ops.convolution strategies.ops.distances strategies.ops.embedding strategies.ops.embedding_bags strategies.ops.factory strategies.ops.fft strategies.ops.gates strategies.ops.indexing_many strategies.ops.indexing_scatter strategies.ops.indexing_whole strategies.ops.joining strategies.ops.joining_pads strategies.ops.linalg strategies.ops.losses_classes strategies.ops.matmul strategies.ops.norms strategies.ops.pointwise_order strategies.ops.pooling strategies.ops.random strategies.ops.reductions_norms strategies.ops.scans strategies.ops.softmax strategies.ops.sorting strategies.ops.variants_lists strategies.ops.views strategies.ops.views_pieces strategies.ops.views_shape strategies.outputs_json strategies.redistributions strategies.settings strategies.smaller_sizes strategies.smaller_values strategies.stage strategies.cost_checked strategies.plan_run_step strategies.plan_text strategies.dtensor_confirm strategies.price_torch strategies.pricing strategies.plan_values
strategies.binding strategies.generated strategies.torch_lists strategies.adverse strategies.changed_index strategies.dask_executor strategies.forms strategies.gate strategies.gate_asked strategies.ops.fused strategies.ops.indexing strategies.ops.linear strategies.ops.losses strategies.ops.pointwise strategies.ops.pooling_resized strategies.ops.reductions strategies.outputs_words strategies.overlay_plan strategies.propagate_afresh strategies.ran strategies.smaller strategies.verdict_cache strategies.dtensor_plans strategies.plan_lockstep strategies.plan_ranks strategies.topology strategies.planner_table
strategies.sources strategies.typed_draws strategies.changed_roots strategies.executors strategies.gate_places strategies.gate_shown strategies.html_findings strategies.ops.foreach strategies.outputs_annotations strategies.outputs_junit strategies.outputs_sarif strategies.outputs_summary strategies.overlay_strategy strategies.probe strategies.propagate strategies.shrink strategies.plan_beside strategies.dtensor_smaller strategies.planner_bound strategies.planner_known
strategies.changed_slice strategies.derived strategies.ops strategies.oracle strategies.picture strategies.races_propagate strategies.repro strategies.selection strategies.suspects strategies.weighing strategies.planner_edges
strategies.changed_reasons strategies.changed_view strategies.dockets strategies.findings strategies.gathering strategies.hearings strategies.own_samples strategies.races_command strategies.scripted strategies.search strategies.planner_search
strategies.changed strategies.changed_digest strategies.cli_races strategies.confirm strategies.discover strategies.lines strategies.tally strategies.trial strategies.planner
strategies.emit strategies.html_page strategies.merge strategies.own_claims strategies.played strategies.settle strategies.cost_check_steps strategies.dtensor_judged strategies.explicit_asked strategies.plan_alternatives
strategies.discover_command strategies.html_report strategies.meshes strategies.ops_coverage strategies.own_trials strategies.pairs strategies.shrunk strategies.cost_check strategies.dtensor_causes strategies.explicit_handlers strategies.explicit_seams strategies.overlay_call strategies.plan_asked
strategies.followed strategies.ops_coverage_command strategies.own_command strategies.cost_command strategies.dtensor_script strategies.dtensor_tried strategies.explicit strategies.overlay strategies.plan_code strategies.plan_shown
strategies.ops.__main__ strategies.dtensor_shown strategies.overlaid strategies.plan_command
strategies.sweep strategies.cli_plan strategies.dtensor_command
strategies.validate
strategies.command strategies.covered strategies.gate_run
strategies.gate_work strategies.merging
strategies.gate_command
strategies.cli_gate
strategies.cli
strategies.__main__
strategies
""".strip().splitlines()
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms.split()}
HOUSES = ("localtensor", "strategies")  # from the ground up
FILES = [file for house in HOUSES for file in sorted((ROOT / house).rglob("*.py"))]


def room_of(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def names_imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Each imported name in full, wherever in the file, with its line; relative ones too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                home = ".".join([*above, *([module] if module else [])])
                yield from ((node.lineno, f"{home}.{alias.name}") for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str() as name), *_]):
                if ast.unparse(func).split(".")[-1] in ("import_module", "_import_module", "__import__"):
                    yield node.lineno, name


def room_imported(name: str) -> str | None:
    """The room that a dotted name leads into, or None if it is not of this house."""
    while name and name not in FLOOR:
        name = name.rpartition(".")[0]
    return name or None


def missteps(file: Path, root: Path) -> list[str]:
    here = room_of(file, root)
    if here not in FLOOR:
        return [f"{here} stands on no floor: give it one in FLOORS, above all that it imports"]
    package = here.split(".") if file.name == "__init__.py" else here.split(".")[:-1]
    found = []
    for line, name in names_imported(ast.parse(file.read_text()), package):
        there = room_imported(name)
        if there is not None and FLOOR[there] >= FLOOR[here]:
            way = "is on the same floor" if FLOOR[there] == FLOOR[here] else "is above it"
            found.append(f"{here} imports {name} on line {line}, but {there} {way}: imports go down only")
    return found


def drawn(picture: str) -> list[set[str]]:
    """The floors of a picture, lowest first: ` 3  house.room  .room   words`."""
    floors = re.findall(r"^ ?\d+  (localtensor|strategies)((?:\.\w+)*(?:  (?:\.\w+)+)*)", picture, re.MULTILINE)
    return [{house + room for room in rooms.split() or [""]} for house, rooms in reversed(floors)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: room_of(file, ROOT))
def test_imports_only_go_down(file):
    assert missteps(file, ROOT) == []


def test_no_floor_holds_a_room_that_is_not_there():
    assert set(FLOOR) == {room_of(file, ROOT) for file in FILES}


def test_the_simulator_never_leans_on_its_judge():
    highest = max(height for room, height in FLOOR.items() if room.startswith("localtensor"))
    lowest = min(height for room, height in FLOOR.items() if room.startswith("strategies"))
    assert highest < lowest


@pytest.mark.parametrize("line", [
    "import localtensor.shards",
    "from localtensor import shards",
    "from localtensor import split",
    "from localtensor.shards import split",
    "from . import shards",
    "from .shards import split",
    "def later():\n    from localtensor.shards import split",
    "if TYPE_CHECKING:\n    from localtensor.shards import split",
    "importlib.import_module('localtensor.shards')",
    "from localtensor.placement import parse",  # sideways
    "import localtensor.partials",  # itself
    "import strategies",
    "from strategies.rules import Rule",
])  # fmt: skip
def test_a_planted_upward_import_is_caught(line, tmp_path):
    file = tmp_path / "localtensor" / "partials.py"
    file.parent.mkdir()
    file.write_text(f"import torch\nfrom localtensor.mesh import Mesh\nfrom localtensor import errors\n{line}\n")
    [sentence] = missteps(file, tmp_path)
    assert sentence.startswith("localtensor.partials imports ")
    assert sentence.endswith(": imports go down only")


def test_a_planted_room_without_a_floor_is_caught(tmp_path):
    file = tmp_path / "localtensor" / "attic.py"
    file.parent.mkdir()
    file.write_text("")
    want = "localtensor.attic stands on no floor: give it one in FLOORS, above all that it imports"
    assert missteps(file, tmp_path) == [want]


def test_the_picture_in_the_readme_is_this_staircase():
    assert drawn((ROOT / "README.md").read_text()) == [set(rooms.split()) for rooms in FLOORS]


def test_a_planted_picture_is_read_from_the_ground_up():
    picture = " 1  strategies.rules  .verdicts   claims. and so on\n ----\n 0  localtensor.errors.base  ._context\n"
    assert drawn(picture) == [
        {"localtensor.errors.base", "localtensor._context"},
        {"strategies.rules", "strategies.verdicts"},
    ]
