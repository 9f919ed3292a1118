"""The workflow and the hook of docs/gate.md are YAML that means what it should, and their commands run as they stand."""

import html
import re
from pathlib import Path

import pytest

from tests.end_to_end.gate.repository import RIGHT, WRONG, edit, made, run
from tests.strategies.edits import git

README = Path(__file__).parents[3] / "docs" / "gate.md"


def blocks(text):
    """The YAML blocks of a document by their first key."""
    found = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {block.partition(":")[0]: block for block in found}


def folded(block, key):
    """The text of `key: >` or `key: ...` in a block, on one line."""
    found = re.search(rf"^( *)(?:- )?{key}: (>?)(.*(?:\n\1 +.*)*)", block, re.MULTILINE)
    assert found is not None, f"no `{key}` in\n{block}"
    text = found[3] if found[2] else found[3].partition("\n")[0]
    return " ".join(text.split())


@pytest.fixture(scope="module")
def yamls():
    return blocks(README.read_text())


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme") / "repository"
    folder.mkdir()
    return made(folder)


@pytest.fixture
def repository(clean):
    """With its first commit, which is right, as the last one, and no hook."""
    yield clean
    first = git(clean, "rev-list", "--max-parents=0", "HEAD")
    git(clean, "reset", "-q", "--hard", first)
    (clean / ".git/hooks/pre-commit").unlink(missing_ok=True)


def command_of(workflow):
    """The one step of the workflow that runs the gate."""
    (step,) = [step for step in re.split(r"^      - ", workflow, flags=re.MULTILINE) if "localtensor gate" in step]
    return folded(step, "run")


def test_both_are_yaml_and_say_what_they_should(yamls):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not needed for anything else")
    workflow, hooks = yaml.safe_load(yamls["name"]), yaml.safe_load(yamls["repos"])
    steps = workflow["jobs"]["gate"]["steps"]
    checkout = next(step for step in steps if step.get("uses", "").startswith("actions/checkout@"))
    assert checkout["with"]["fetch-depth"] == 0, "the revision of --changed must be there"
    (gate,) = [step for step in steps if "localtensor gate" in step.get("run", "")]
    assert " ".join(gate["run"].split()) == command_of(yamls["name"])
    assert workflow["permissions"]["security-events"] == "write"
    (hook,) = hooks["repos"][0]["hooks"]
    assert hook["entry"] == folded(yamls["repos"], "entry") and hook["pass_filenames"] is False


@pytest.mark.slow  # test_packaging runs the same step in the action
@pytest.mark.slow  # test_packaging runs the action, which does the same
def test_the_step_of_the_workflow_fails_a_wrong_rule_and_writes_its_files(yamls, repository, tmp_path):
    base = git(repository, "rev-parse", "HEAD")
    edit(repository, "my_ops/rules.py", RIGHT, WRONG)
    summary = tmp_path / "summary.md"
    command = command_of(yamls["name"])
    code, out, err, seconds = run(repository, "bash", "-ec", command, BASE=base, GITHUB_STEP_SUMMARY=str(summary))
    print(f"the step of the workflow: {seconds:.1f} s")
    assert code == 1, err
    assert re.search(r"^::error .*file=my_ops/rules\.py", out, re.MULTILINE)
    assert "my_ops.running.default" in html.unescape(summary.read_text())
    named = re.findall(r"[\w-]+\.(?:sarif|xml)\b", command)
    assert len(named) == 2 and all((repository / name).stat().st_size for name in named)


@pytest.mark.slow
def test_the_step_of_the_workflow_judges_all_where_there_is_no_base(yamls, repository, tmp_path):
    command = command_of(yamls["name"])
    code, out, err, _ = run(repository, "bash", "-ec", command, BASE="", GITHUB_STEP_SUMMARY=str(tmp_path / "s.md"))
    assert (code, err) == (0, "") and "of 2 overloads" in out


@pytest.mark.slow  # test_packaging runs the action, and test_story the gate
def test_the_hook_passes_what_is_right_and_stops_what_is_not_yet_committed_and_wrong(yamls, repository):
    hook = repository / ".git/hooks/pre-commit"
    entry = folded(yamls["repos"], "entry")
    hook.write_text(f"#!/bin/sh\nexec {entry}\n")  # what pre-commit does, with its environment: that of git
    hook.chmod(0o755)
    rule = repository / "my_ops/rules.py"
    rule.write_text(rule.read_text().replace("How the two", "In which way the two"))
    who = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    assert run(repository, *who, "commit", "-qam", "words")[0] == 0
    rule.write_text(rule.read_text().replace(RIGHT, WRONG))
    code, out, err, seconds = run(repository, *who, "commit", "-qam", "wrong")
    print(f"the hook: {seconds:.1f} s")
    assert code == 1 and "S(0) -> S(0)" in out + err
    assert git(repository, "log", "-1", "--format=%s") == "words"
