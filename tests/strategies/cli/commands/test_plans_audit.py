"""`localtensor validate --plans`: options, report, exit codes."""

import json

import pytest
from typer.testing import CliRunner

from strategies.base.options import BadOption
from strategies.cli import options as commands
from strategies.cli.app import app
from strategies.cli.commands import plans_audit
from strategies.cli.commands.plans_audit import exit_code, run
from strategies.cli.options import ValidateOptions, parse_mesh
from strategies.planner.audit.compare import CORRECT, Outcome
from strategies.planner.audit.report import AuditResult, Cause, audit_json, audit_text, count_outcomes, total_waste
from strategies.planner.audit.verdict import PairVerdict
from tests.tools.plans.plan_pairs import pair
from tests.torch_here import before_2_14

PAIR = pair("S(0)", "P(sum)", (2,), (1,))
REFUSED = Outcome("refused", "RuntimeError: not supported")
CAUSE = Cause("refused: x", PAIR, ("greedy",), REFUSED, 3, PAIR, confirmed=True)
NOTHING = AuditResult("2.13.0", 0, (), (), ())


def asked(**options):
    return ValidateOptions(plans=True, **options)


@pytest.mark.parametrize(("wrong", "argument"), [
    ({"mesh": ("2,x",)}, "--mesh"), ({"mesh": ("0",)}, "--mesh"), ({"mesh": ("9,9",)}, "--mesh"),
    ({"samples": 0}, "--samples"), ({"seed": -1}, "--seed"), ({"planner": "best"}, "--planner"),
    ({"confirm": "nccl"}, "--confirm"),
])  # fmt: skip
def test_options_that_cannot_be_followed_are_refused(wrong, argument):
    with pytest.raises(BadOption, match=argument):
        asked(**wrong)


@pytest.mark.parametrize("words", [("--mesh", "2,x"), ("--samples", "0")])
def test_the_command_line_leaves_with_2_and_one_sentence_for_such_options(words):
    result = CliRunner().invoke(app, ["validate", "--plans", *words])
    assert (result.exit_code, result.stdout, result.stderr.count("\n"), words[0] in result.stderr) == (2, "", 1, True)


@pytest.mark.parametrize(("line", "named"), [
    ("add --plans", "OP"), ("--plans --all", "--all"), ("--plans --search", "--search"),
    ("--plans --ranks 2", "--ranks"), ("--plans --dtype bool", "--dtype"), ("--plans --device cuda", "--device"),
    ("--plans --rules x", "--rules"), ("--plans --pairs", "--pairs"), ("--plans --journal j", "--journal"),
    ("--plans --resume", "--resume"), ("--plans --shard 1/2", "--shard"), ("--plans --executor dask", "--executor"),
    ("--plans --workers 2", "--workers"), ("add --samples 3", "--samples"), ("add --planner greedy", "--planner"),
    ("--plans --all --pairs", "--all, --pairs"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_its_name(line, named, capfd):
    result = CliRunner().invoke(app, ["validate", *line.split()])
    told = capfd.readouterr().err + result.stderr
    assert result.exit_code == 2
    assert f": {named}" in told
    assert len(told.splitlines()) == 1


def test_a_mesh_is_sizes_with_commas_between():
    assert (parse_mesh("2"), parse_mesh("2,3"), parse_mesh("2, 2,2")) == ((2,), (2, 3), (2, 2, 2))
    for text in ("\N{SUPERSCRIPT TWO}", "9" * 5_000):
        with pytest.raises(BadOption, match="a mesh is a size"):
            parse_mesh(text)


def test_a_mesh_that_is_named_twice_is_tried_once(capsys):
    assert run(asked(mesh=("2,1", "2, 1"), samples=2, planner="graph", confirm="none", quiet=True)) in (0, 1)
    assert ": 2 on (2, 1); seed 0" in capsys.readouterr().out


def test_exit_codes():
    verdict = PairVerdict(PAIR, "greedy", CORRECT, None)
    tried = AuditResult("2.13.0", 0, count_outcomes([verdict]), (), ())
    assert exit_code(NOTHING) == 3
    assert exit_code(tried) == 0
    assert exit_code(AuditResult("2.13.0", 0, tried.rows, (CAUSE,), ())) == 1
    suspected = Cause("x", PAIR, ("greedy",), REFUSED, 1, PAIR)
    assert exit_code(AuditResult("2.13.0", 0, tried.rows, (suspected,), ())) == 0


def test_a_report_names_the_finding_its_planners_and_its_smallest_pair():
    verdicts = [PairVerdict(PAIR, "greedy", REFUSED, None)]
    suspected = Cause("x", PAIR, ("greedy", "graph"), Outcome("wrong", "rank 0 holds"), 1, PAIR, note="right: ")
    tried = AuditResult("2.13.0", 7, count_outcomes(verdicts), (CAUSE, suspected), total_waste(verdicts), whole=False)
    text = audit_text(tried)
    assert "DTensor's own redistribution, torch 2.13.0: 1 on (2,); seed 7" in text
    assert "S(0) -> P(sum)  (greedy; met 3 times; a user cannot ask for it)" in text
    assert "f64[1] @ a:S(0) -> a:P(sum) on (2,): RuntimeError: not supported" in text
    assert text.index("On simulated ranks only") > text.index("Refused, though there is a plan")
    assert "real processes: right" in text
    assert "Stopped before all was tried." in text
    told = json.loads(audit_json(tried, 1))
    assert (told["exit"], told["pairs"], told["rows"][0]["refused"]) == (1, 1, 1)
    assert told["findings"][0]["src"] == {"placements": ["S(0)"], "order": []}
    assert [one["confirmed"] for one in told["findings"]] == [True, False]


@pytest.fixture
def few(monkeypatch):
    """Two pairs that go wrong and are as small as they go, and one that does not."""
    pairs = [PAIR, pair("R", "P(product)", (2,), (1,)), pair("S(0)", "R", (2,), (5,))]
    monkeypatch.setattr(plans_audit, "draw_pairs", lambda mesh, seed, budget: pairs[:budget])


@before_2_14
def test_a_run_prints_its_report_and_writes_it_and_a_script_for_each_finding(few, tmp_path, capsys):
    options = asked(mesh=("2",), samples=3, json=tmp_path / "r.json", repro=tmp_path / "scripts", quiet=True)
    assert run(options) == 1
    text = capsys.readouterr().out
    told = json.loads((tmp_path / "r.json").read_text())
    assert f"{told['pairs']} on (2,)" in text
    assert len(told["findings"]) == 2
    assert all(one["confirmed"] for one in told["findings"])
    scripts = sorted((tmp_path / "scripts").iterdir())
    assert len(scripts) == len(told["findings"])
    compile(scripts[0].read_text(), "script", "exec")
    assert "Repeat: localtensor validate --plans --mesh 2 --samples 3 --seed 0 --planner both --confirm gloo" in text
    assert set(told["waste"]) == {"greedy", "graph"}


def test_unconfirmed_findings_are_no_findings(few, capsys):
    assert run(asked(mesh=("2",), samples=3, planner="graph", confirm="none", quiet=True)) == 0
    assert "On simulated ranks only" in capsys.readouterr().out


def test_ctrl_c_leaves_what_was_found_printed(monkeypatch, capsys):
    def judge(pairs, mode, seed):
        yield PairVerdict(PAIR, mode, REFUSED, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(plans_audit, "pair_verdicts", judge)
    assert run(asked(mesh=("2",), samples=5, quiet=True)) == 130
    text = capsys.readouterr().out
    assert "Stopped before all was tried." in text
    assert "greedy: f64[1] @ a:S(0) -> a:P(sum) on (2,): RuntimeError: not supported" in text


def test_a_file_that_cannot_be_written_is_reported_and_the_report_is_whole(tmp_path, capsys):
    options = asked(mesh=("2",), samples=3, confirm="none", json=tmp_path / "taken" / "r.json", quiet=True)
    (tmp_path / "taken").write_text("")  # meanwhile
    assert run(options) == 3
    told = capsys.readouterr()
    assert "the report above is whole" in told.err
    assert "DTensor's own redistribution" in told.out


@pytest.mark.parametrize(("option", "name", "said"), [
    ("json", "folder", "--json: {here}/folder: this is a folder. Name a file."),
    ("json", "file/r.json", "--json: {here}/file/r.json: {here}/file takes no files. Name a file in a folder of yours."),
    ("repro", "file", "--repro: {here}/file: this is a file. Name a folder; it is made if it is not there."),
])  # fmt: skip
def test_a_place_that_takes_no_file_is_refused_before_the_work(option, name, said, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadOption) as refused:
        asked(**{option: tmp_path / name})
    assert str(refused.value) == f"localtensor validate --plans: {said.format(here=tmp_path)}"


def test_a_size_beyond_all_numbers_of_the_machine_is_refused():
    with pytest.raises(BadOption, match="these are more than 64 ranks"):
        parse_mesh("99999999999999999999999")


def test_a_seed_that_generators_do_not_take_is_refused():
    with pytest.raises(BadOption, match="less than 2\\*\\*63"):
        asked(seed=2**63)


def test_a_full_standard_output_is_infrastructure_and_the_files_are_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "write_stdout", lambda text: "cannot write to standard output: full.")
    options = asked(mesh=("2",), samples=1, confirm="none", json=tmp_path / "r.json", quiet=True)
    assert run(options) == 3
    assert capsys.readouterr().err == "localtensor: cannot write to standard output: full.\n"
    assert (tmp_path / "r.json").exists()
