"""The action, the hook, the workflows and the Dockerfile obey their schemas, name what is there, and do what they say."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.gate.repository import RIGHT, WRONG, edit, made, run
from tests.end_to_end.test_docs import ROOT
from tests.strategies.edits import git

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `test`")

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTION = ROOT / "action.yml"
pytestmark = pytest.mark.skipif(
    not WORKFLOWS, reason="an sdist leaves out the files for hosts, whose names begin with a dot"
)
SCHEMAS = [("vendor.github-actions", ACTION), *(("vendor.github-workflows", file) for file in WORKFLOWS)]


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    return made(folder)


def action() -> dict:
    return yaml.safe_load(ACTION.read_text())


def gate_step() -> dict:
    (step,) = [step for step in action()["runs"]["steps"] if step.get("id") == "gate"]
    return step


def take_step(repository, tmp_path, **inputs):
    """The gate's step of the action, as a runner calls it: the exit code, what it printed, and the files of the runner."""
    files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    given = {"RULES": "my_ops.rules", "CHANGED": "", "BUDGET": "10m", "OPTIONS": "", **inputs}
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", gate_step()["run"]]
    code, out, err, _ = run(repository, *script, **given, **{name: str(file) for name, file in files.items()})
    return code, out, err, {name: file.read_text() if file.exists() else "" for name, file in files.items()}


@pytest.mark.parametrize(("schema", "file"), SCHEMAS, ids=lambda part: getattr(part, "name", part))
def test_a_file_for_github_obeys_the_schema_of_github(schema, file):
    pytest.importorskip("check_jsonschema", reason="check-jsonschema comes with the extra `dev`")
    done = check(schema, file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_planted_mistake_in_a_workflow_is_caught(tmp_path):
    pytest.importorskip("check_jsonschema", reason="check-jsonschema comes with the extra `dev`")
    file = tmp_path / "tests.yml"
    file.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs_on:", 1))
    assert check("vendor.github-workflows", file).returncode == 1


def check(schema: str, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


RUNS_ON_NODE_24 = {
    "actions/checkout": 5, "actions/setup-python": 6, "actions/cache": 5, "actions/upload-artifact": 6,
    "github/codeql-action/upload-sarif": 4,
}  # fmt: skip
"""The first version of each action that runs on Node 24: GitHub's runners have no Node 20 since the autumn of 2026."""


def test_an_action_has_one_version_here_and_on_the_page_and_runners_can_run_it():
    texts = [file.read_text() for file in (ACTION, *WORKFLOWS, ROOT / "docs/gate.md")]
    used = {found for text in texts for found in re.findall(r"uses: ([a-z/-]+)@v(\d+)$", text, re.MULTILINE)}
    assert sorted(name for name, _ in used) == sorted(RUNS_ON_NODE_24)
    assert all(int(version) >= RUNS_ON_NODE_24[name] for name, version in used)


def as_workflow() -> str:
    """The steps of the action as a workflow, for a linter that reads only these."""
    steps = [{word: value for word, value in step.items() if word != "shell"} for step in action()["runs"]["steps"]]
    inputs = {name: {"type": "string"} for name in action()["inputs"]}
    job = {"runs-on": "ubuntu-latest", "steps": steps}
    return yaml.safe_dump({"name": "action", "on": {"workflow_call": {"inputs": inputs}}, "jobs": {"gate": job}})


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint is not on the PATH")
def test_actionlint_finds_nothing_in_the_workflows_the_action_and_those_of_the_page(tmp_path):
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/gate.md").read_text(), re.MULTILINE | re.DOTALL)
    pages = [block for block in blocks if "\njobs:" in block]
    assert len(pages) == 2
    for number, text in enumerate([as_workflow(), *pages, *(file.read_text() for file in WORKFLOWS)]):
        (folder / f"{number}.yml").write_text(text)
    git(tmp_path, "init", "-q")
    done = subprocess.run(["actionlint"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not on the PATH")
def test_hadolint_finds_nothing_in_the_dockerfile():
    done = subprocess.run(
        ["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_input_of_the_action_is_used_and_none_is_pasted_into_a_script():
    steps = action()["runs"]["steps"]
    used = set(re.findall(r"inputs\.([\w-]+)", ACTION.read_text()))
    assert used == set(action()["inputs"])
    scripts = [step["run"] for step in steps if "run" in step]
    assert len(scripts) == 2 and not [script for script in scripts if "${{" in script]
    for step in steps:
        named = set(re.findall(r"\$\{?([A-Z_]+)", step.get("run", "")))
        assert named <= {*step.get("env", {}), "GITHUB_ACTION_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"}


def test_the_page_lists_the_inputs_of_the_action_with_their_defaults():
    page = (ROOT / "docs/gate.md").read_text().partition("## An action for GitHub")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \|(?: `([^`]*)`|[^|]*) \|$", page, re.MULTILINE))
    assert set(rows) == set(action()["inputs"])
    for name, given in action()["inputs"].items():
        assert rows[name] in ("", given.get("default", ""))


@pytest.mark.slow
def test_the_action_fails_a_wrong_rule_annotates_its_line_and_writes_what_is_uploaded(repository, tmp_path):
    base = git(repository, "rev-parse", "HEAD")
    edit(repository, "my_ops/rules.py", RIGHT, WRONG)
    code, out, err, files = take_step(repository, tmp_path, CHANGED=base)
    assert code == 1, err
    assert re.search(r"^::error .*file=my_ops/rules\.py", out, re.MULTILINE)
    assert files["GITHUB_OUTPUT"] == "exit-code=1\n" and "my" in files["GITHUB_STEP_SUMMARY"]
    assert (repository / "localtensor.sarif").stat().st_size and (repository / "localtensor.xml").stat().st_size


@pytest.mark.slow
def test_the_action_passes_what_did_not_change_and_reports_a_usage_error_as_one(repository, tmp_path):
    base = git(repository, "rev-parse", "HEAD")
    assert take_step(repository, tmp_path, CHANGED=base)[0] == 0
    code, _, err, files = take_step(repository, tmp_path, OPTIONS="--conjure")
    assert code == 2 and "--conjure" in err and files["GITHUB_OUTPUT"].endswith("exit-code=2\n")


def test_what_an_input_holds_is_never_run(repository, tmp_path):
    code, *_ = take_step(repository, tmp_path, RULES="$(touch planted)", OPTIONS="$(touch planted) ; touch planted")
    assert code == 2 and not (repository / "planted").exists()


def test_the_hook_is_the_command_of_the_page_and_its_words_are_options_of_the_gate():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    (local,) = re.findall(r"^ *entry: (.*)$", (ROOT / "docs/gate.md").read_text(), re.MULTILINE)
    entry, page = shlex.split(hook["entry"]), shlex.split(local)
    assert sorted([*entry, "--rules", "my_ops.rules"]) == sorted(page)
    assert hook["pass_filenames"] is False and hook["language"] == "system" and hook["id"] == "localtensor-gate"
    assert {"id", "name", "entry", "language"} <= set(hook) <= {
        "id", "name", "entry", "language", "description", "types_or", "pass_filenames", "require_serial",
    }  # fmt: skip


@pytest.mark.slow  # gate/test_readme runs the same hook
def test_the_hook_stops_a_wrong_rule(repository):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    rules = repository / "my_ops/rules.py"
    rules.write_text(rules.read_text().replace(RIGHT, WRONG))  # not yet committed
    code, out, err, _ = run(repository, *shlex.split(hook["entry"]), "--rules", "my_ops.rules")
    assert code == 1 and "S(0) -> S(0)" in out + err


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_what_a_workflow_runs_is_there_and_its_pythons_are_those_of_the_metadata(file):
    jobs = yaml.safe_load(file.read_text())["jobs"]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len(scripts) == len(jobs)
    for words in map(shlex.split, scripts):
        known = set(words[1:]) <= targets if words[0] == "make" else os.access(ROOT / words[0], os.X_OK)
        assert known, words
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert [job["strategy"]["matrix"]["python"] for job in jobs.values() if "strategy" in job] == [pythons]
    assert all(job["timeout-minutes"] <= 120 for job in jobs.values())


def test_what_the_dockerfile_copies_is_enough_for_a_wheel_with_the_pinned_torch(tmp_path):
    pytest.importorskip("build", reason="`build` comes with the extra `dev`")
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line[:1].isalpha()]
    assert {word for word, _ in steps} == {
        "ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    sources = [source for word, rest in steps if word == "COPY" for source in rest.split()[:-1]]
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert set(sources) == let_through
    for source in sources:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
        copy(ROOT / source, tmp_path / source)
    command = [sys.executable, *"-m build --wheel --no-isolation".split(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and len(list((tmp_path / "dist").glob("*.whl"))) == 1, done.stderr[-2000:]
    (installs,) = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    assert "-c constraints.txt" in installs and re.search(
        r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.M
    )
