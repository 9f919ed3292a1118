"""`[tool.localtensor]` of pyproject.toml: what it may hold, where it is found, and that a command line comes first."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from strategies.base.options import BadSection, read_section
from strategies.cli import app as cli
from strategies.cli.commands import gate, validate
from strategies.gate.options import GateOptions

WHOLE = """
[project]
name = "mine"

[tool.localtensor]
rules = "my_rules"
ranks = [2, 5]
meshes = ["2,2", [2, 3]]
dtypes = ["float64", "bfloat16"]
baseline = "ci/accepted.json"
budget = "5m"
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The top of a git repository with the section, which is the working folder."""
    (tmp_path / "pyproject.toml").write_text(WHOLE)
    (tmp_path / ".git").mkdir()
    (tmp_path / "ci").mkdir()
    (tmp_path / "my_rules.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def handed_on(monkeypatch):
    """What each command hands on, instead of a run."""
    found = []
    for module in (gate, validate):
        monkeypatch.setattr(module, "run", lambda options: found.append(options) or 0)
    return found


def called(words, handed_on):
    done = CliRunner().invoke(cli.app, cli.repeat_options(words.split()))
    assert done.exit_code == 0, done.output
    return handed_on.pop()


def test_a_bare_gate_knows_all(project, handed_on):
    assert called("gate", handed_on) == GateOptions(
        rules="my_rules", ranks=(2, 5), mesh=("2,2", "2,3"), dtypes=("float64", "bfloat16"),
        baseline=Path("ci/accepted.json"), budget="5m",
    )  # fmt: skip


def test_a_bare_validate_takes_what_it_has_options_for(project, handed_on):
    found = called("validate", handed_on)
    assert (found.rules, found.ranks, found.mesh, found.dtypes) == (
        "my_rules", (2, 5), ("2,2", "2,3"), ("float64", "bfloat16"),
    )  # fmt: skip


@pytest.mark.parametrize("words", ["validate cumprod", "gate cumprod", "validate --all", "gate --all"])
def test_rules_are_used_where_the_command_line_names_nothing_to_judge(words, project, handed_on):
    found = called(words, handed_on)
    assert (found.rules, found.ranks) == ("dtensor", (2, 5))


@pytest.mark.parametrize(("words", "ranks", "mesh"), [
    ("gate --ranks 3", (3,), ()), ("gate --mesh 2", (), ("2",)), ("gate --ranks 3 --mesh 4,2", (3,), ("4,2",)),
])  # fmt: skip
def test_meshes_of_the_command_line_replace_those_of_the_file(words, ranks, mesh, project, handed_on):
    found = called(words, handed_on)
    assert (found.ranks, found.mesh, found.rules) == (ranks, mesh, "my_rules")


@pytest.mark.parametrize(("words", "field", "value"), [
    ("gate --budget 9s", "budget", "9s"), ("gate --baseline other.json", "baseline", Path("other.json")),
    ("gate --dtype bool", "dtypes", ("bool",)), ("gate --rules json", "rules", "json"),
])  # fmt: skip
def test_an_option_comes_before_the_file(words, field, value, project, handed_on):
    assert getattr(called(words, handed_on), field) == value


def test_plans_and_a_case_take_nothing_from_the_file(project, handed_on, monkeypatch):
    found = called("validate --case something", handed_on)
    assert (found.rules, found.ranks, found.dtypes) == ("dtensor", (), ())
    monkeypatch.setattr("strategies.cli.commands.plans_audit.run", lambda options: handed_on.append(options) or 0)
    assert called("validate --plans", handed_on).ranks == ()


def test_a_folder_of_the_repository_finds_it_and_names_files_from_there(project, handed_on, monkeypatch):
    (project / "src/deep").mkdir(parents=True)
    monkeypatch.chdir(project / "src/deep")
    found = called("gate", handed_on)
    assert (found.rules, found.baseline) == ("../../my_rules.py", Path("../../ci/accepted.json"))


def test_the_nearest_file_with_the_section_counts(project, handed_on, monkeypatch):
    (project / "a/b").mkdir(parents=True)
    (project / "a/pyproject.toml").write_text("[tool.localtensor]\nranks = [7]\n")
    (project / "a/b/pyproject.toml").write_text("[tool.other]\nranks = [8]\n")
    monkeypatch.chdir(project / "a/b")
    assert called("validate add", handed_on).ranks == (7,)


def test_a_file_above_the_repository_is_not_read(project, handed_on, monkeypatch):
    (project / "inner/.git").mkdir(parents=True)
    monkeypatch.chdir(project / "inner")
    assert called("validate add", handed_on).ranks == ()
    (project / ".git").rmdir()
    (project / "inner/.git").rmdir()
    assert called("validate add", handed_on).ranks == ()


@pytest.mark.parametrize(("text", "problem"), [
    ("rnaks = [2]", "rnaks: there is no such key. Did you mean ranks?"),
    ("colour = 2", "colour: there is no such key. The keys are rules, ranks, meshes, dtypes, baseline, budget."),
    ("ranks = 2", "ranks = 2: a value of another form is needed. Write ranks = [2, 3]."),
    ("ranks = [true]", "ranks = [True]: a value of another form is needed. Write ranks = [2, 3]."),
    ("ranks = []", "ranks = []: a value of another form is needed. Write ranks = [2, 3]."),
    ('meshes = "2,2"', "meshes = '2,2': a value of another form is needed. Write meshes = [\"2,2\"]."),
    ("dtypes = [1]", 'dtypes = [1]: a value of another form is needed. Write dtypes = ["float64", "int64"].'),
    ('rules = ["a"]', "rules = ['a']: a value of another form is needed. Write rules = \"my_package.my_rules\"."),
    ('baseline = ""', "baseline = '': a value of another form is needed. Write baseline = \"localtensor-baseline.json\"."),
    ("budget = 5", 'budget = 5: a value of another form is needed. Write budget = "5m".'),
])  # fmt: skip
def test_what_cannot_be_used_is_refused(text, problem, project):
    (project / "pyproject.toml").write_text(f"[tool.localtensor]\n{text}\n")
    with pytest.raises(BadSection) as refused:
        read_section("localtensor gate", project)
    assert str(refused.value) == f"localtensor gate: [tool.localtensor] of pyproject.toml: {problem}"


@pytest.mark.parametrize(("text", "problem"), [
    ("[tool.localtensor\n", "the file: it is no TOML ("), ("tool.localtensor = 5\n", "localtensor: it is no table."),
    (f"[tool.localtensor]\nrules = {'[' * 9_999}", "the file: it is nested too deep."),
    ('[tool.localtensor]\nbaseline = "a\\u0000b"\n', "baseline = 'a\\x00b': a value of another form is needed."),
])  # fmt: skip
def test_a_file_that_seems_to_have_the_section_and_is_broken_is_refused(text, problem, project):
    (project / "pyproject.toml").write_text(text)
    done = CliRunner().invoke(cli.app, ["gate"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"localtensor gate: [tool.localtensor] of pyproject.toml: {problem}")


@pytest.mark.parametrize("text", ["[tool\n", "tool = 5\n", "# localtensor\n", "[tool.other]\n", "\udcff"])
def test_another_file_is_no_concern_of_ours(text, project):
    (project / "pyproject.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert read_section("localtensor gate", project).values == {}


def test_a_value_that_the_command_refuses_names_the_file(project):
    (project / "pyproject.toml").write_text('[tool.localtensor]\nrules = "my_rules"\nmeshes = ["9,9"]\n')
    done = CliRunner().invoke(cli.app, ["gate"])
    assert (done.exit_code, done.stderr) == (2, (
        "localtensor gate: --mesh: 9,9: it has 81 ranks. Take a mesh of 2 to 64 ranks. (rules, meshes: from pyproject.toml)\n"
    ))  # fmt: skip
