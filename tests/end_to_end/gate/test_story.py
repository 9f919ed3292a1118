"""The gate in somebody's repository, from a clean commit through a wrong rule to its mend, by the command line.

The runs are one story, told once; each test reads one page of it.
"""

import json
from types import SimpleNamespace

import pytest

from tests.end_to_end.gate.repository import BASELINE, COMMAND, RIGHT, WRONG, edit, gate, made, run
from tests.strategies.edits import git

RUNNING = "my_ops.running.default"
COLD, WARM = 20, 5
"""Seconds that a change of one rule may take, and a run that was done before."""
MARGIN = 6
"""Machines that run tests are noisy: only what is beyond this multiple fails; the figures are printed."""


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate") / "repository"
    folder.mkdir()
    repository = made(folder)
    told = SimpleNamespace(repository=repository)
    told.clean = gate(repository)
    told.again = gate(repository)
    edit(repository, "my_ops/rules.py", "How the two ops", "In which way the two ops")
    (repository / "README.md").write_text("Two ops.\n")
    told.docs = gate(repository, "--changed", "HEAD~1")
    told.wrong_commit = edit(repository, "my_ops/rules.py", RIGHT, WRONG)
    told.wrong = gate(repository, "--changed", "HEAD~1")
    told.accepted = gate(repository, "--accept", "issue 12: needs a reduction")
    told.entries = json.loads((repository / BASELINE).read_text())["entries"]
    told.expired = _expired(repository)
    edit(repository, "my_ops/rules.py", WRONG, RIGHT)
    told.mended = gate(repository)
    told.updated = gate(repository, "--update")
    for name, ran in vars(told).items():
        if hasattr(ran, "seconds"):
            print(f"{name}: exit code {ran.code}, {ran.seconds:.1f} s")
    return told


def _expired(repository):
    """A run on a day after the last one on which its entries accept what they name; the baseline is put back."""
    file = repository / BASELINE
    before = file.read_text()
    baseline = json.loads(before)
    file.write_text(
        json.dumps({**baseline, "entries": [{**entry, "expires": "2020-01-31"} for entry in baseline["entries"]]})
    )
    ran = gate(repository)
    file.write_text(before)
    return ran


def rules(ran):
    """The rules that the run found wrong and that nobody has accepted."""
    return {(key["op"], key["rule"]) for finding in ran.told["findings"] for key in finding["new"]}


def test_a_clean_commit_passes(story):
    assert (story.clean.code, story.clean.told["findings"], story.clean.err) == (0, [], "")
    assert story.clean.told["judged"] == [RUNNING, "my_ops.twice.default"]
    assert "gate passed: 0 new, 0 accepted, 0 gone" in story.clean.out


def test_the_same_again_is_remembered(story):
    assert (story.again.code, story.again.told["remembered"]) == (0, [RUNNING, "my_ops.twice.default"])
    assert {**story.again.told["counts"]} == story.clean.told["counts"]


def test_documentation_and_docstrings_pass_without_any_judging(story):
    assert (story.docs.code, story.docs.told["judged"], story.docs.told["choices"]) == (0, [], [])
    assert "no rule changed since HEAD~1: nothing had to be judged (2 overloads unchanged)" in story.docs.out
    assert story.docs.told["seconds"] < WARM * MARGIN


def test_a_wrong_rule_fails_with_that_rule_and_nothing_else(story):
    assert story.wrong.code == 1
    assert rules(story.wrong) == {(RUNNING, "S(0) -> S(0)")}
    (finding,) = story.wrong.told["findings"]
    assert (finding["verdict"], finding["confirmed_on"], finding["place"]["file"]) == (
        "unsound",
        "gloo",
        "my_ops/rules.py",
    )
    assert f"{RUNNING}: S(0) -> S(0)" in story.wrong.out and "twice" not in story.wrong.out


def test_only_what_the_commit_changed_is_judged_and_the_reason_is_reported(story):
    reason = "its rule function `running_rule` changed"
    assert story.wrong.told["choices"] == [{"op": RUNNING, "reason": reason}]
    assert story.wrong.told["judged"] == [RUNNING]
    assert f"{RUNNING}: {reason}" in story.wrong.out


def test_what_is_accepted_passes_and_is_in_the_baseline_by_what_it_means(story):
    assert story.accepted.code == 0 and story.accepted.told["findings"][0]["new"] == []
    assert {(entry["op"], entry["rule"], entry["mesh"]) for entry in story.entries} == {
        (RUNNING, "S(0) -> S(0)", "1 axis")
    }
    assert {entry["reason"] for entry in story.entries} == {"issue 12: needs a reduction"}
    assert not {"line", "file", "place"} & set().union(*story.entries)
    assert "gate passed: 0 new, 1 accepted, 0 gone" in story.accepted.out
    assert "4 entries of 1 rule function written, 0 removed" in story.accepted.out
    assert story.accepted.told["causes"] == {"new": 0, "accepted": 1}


def test_an_entry_past_its_last_day_accepts_nothing(story):
    assert story.expired.code == 1 and rules(story.expired) == {(RUNNING, "S(0) -> S(0)")}
    assert [entry["expires"] for entry in story.expired.told["expired"]] == ["2020-01-31"] * len(story.entries)
    assert "1 new, 0 accepted, 0 gone, 4 expired" in story.expired.out


def test_a_fixed_rule_fails_until_the_baseline_has_shrunk(story):
    assert story.mended.code == 1 and story.mended.told["findings"] == []
    assert {(gone["op"], gone["rule"]) for gone in story.mended.told["gone"]} == {(RUNNING, "S(0) -> S(0)")}
    assert len(story.mended.baseline["entries"]) == len(story.entries) == 4
    assert (story.updated.code, story.updated.baseline["entries"]) == (0, [])


def test_a_change_of_one_rule_and_an_equal_run_are_quick(story):
    figures = f"one rule: {story.wrong.seconds:.1f} s; an equal run: {story.again.seconds:.1f} s"
    print(figures)
    assert story.wrong.seconds < COLD * MARGIN, figures
    assert story.again.seconds < WARM * MARGIN, figures


@pytest.mark.parametrize(("options", "said"), [
    (["--changed", "nowhere"], "localtensor gate: --changed: 'nowhere': git knows no such commit. Name a branch,"),
    (["--baseline", "my_ops/ops.py"], "localtensor gate: --baseline: my_ops/ops.py: "),
], ids=["a revision that git does not know", "a corrupt baseline"])  # fmt: skip
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(story, options, said):
    ran = gate(story.repository, *options)
    assert (ran.code, ran.out, ran.told) == (2, "", {})
    assert ran.err.startswith(said) and len(ran.err.strip().splitlines()) == 1


def test_what_changed_cannot_be_asked_outside_of_a_repository(story, tmp_path):
    git(tmp_path, "-C", str(story.repository), "checkout-index", "-a", f"--prefix={tmp_path}/")
    said = str(COMMAND), "gate", "--rules", "my_ops.rules", "--changed", "HEAD"
    code, out, err, _ = run(tmp_path, *said, GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert (code, out) == (2, "")
    assert err.startswith(f"localtensor gate: folder: {tmp_path}: no work tree of a git repository")
    assert len(err.strip().splitlines()) == 1
