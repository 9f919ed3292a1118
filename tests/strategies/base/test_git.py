"""What git knows of a repository, and what it is never made to do."""

import os
import stat
import subprocess

import pytest

from localtensor.errors import LocalTensorError
from strategies.base import git as git_tree
from strategies.base.git import BadRevision, NoGit, NoRepository, blob_name, repository
from tests.strategies.edits import commit, git


@pytest.fixture
def here(tmp_path):
    """A repository with two commits, and its first commit."""
    git(tmp_path, "init", "-q")
    (tmp_path / "kept.py").write_text("kept = 1\n")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder/é.py").write_bytes(b"x = 1\r\n\0")
    first = commit(tmp_path)
    (tmp_path / "kept.py").write_text("kept = 2\n")
    (tmp_path / ".gitignore").write_text("*.log\n")
    commit(tmp_path)
    return tmp_path, first


def test_the_top_is_found_from_below_and_a_revision_has_its_full_name(here):
    folder, first = here
    found = repository(folder / "a folder")
    assert found.top == folder.resolve()
    assert found.commit("HEAD~1") == found.commit(first[:8]) == first


def test_files_of_today_are_listed_new_ones_too_and_without_those_that_are_gone_or_ignored(here):
    folder, _ = here
    (folder / "new.py").write_text("")
    (folder / "run.log").write_text("")
    (folder / "kept.py").unlink()
    assert repository(folder).files() == (".gitignore", "a folder/é.py", "new.py")


def test_bytecode_is_no_file_of_today_though_no_one_ignores_it(here):
    folder, _ = here
    before = repository(folder).files()
    (folder / "pkg/__pycache__").mkdir(parents=True)
    (folder / "pkg/__pycache__/made.cpython-311.pyc").write_bytes(b"")
    (folder / "pkg/made.py").write_text("")
    assert set(repository(folder).files()) == {*before, "pkg/made.py"}


def test_contents_of_a_commit_come_as_they_are_stored(here):
    folder, first = here
    found = repository(folder)
    blobs = found.blobs(first)
    assert sorted(blobs) == ["a folder/é.py", "kept.py"]
    texts = found.contents(list(blobs.values()))
    assert {path: texts[blob] for path, blob in blobs.items()} == {
        "kept.py": b"kept = 1\n",
        "a folder/é.py": b"x = 1\r\n\0",
    }
    assert all(blob_name(text, blob) == blob for blob, text in texts.items())
    assert found.contents([]) == {}


def test_links_and_submodules_are_no_files_of_a_commit(here):
    folder, _ = here
    (folder / "link.py").symlink_to("kept.py")
    assert "link.py" not in repository(folder).blobs(commit(folder))


def test_a_submodule_is_known_by_its_commit_and_differs_as_soon_as_a_file_does(here, tmp_path_factory):
    folder, first = here
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    (other / "it.py").write_text("it = 1\n")
    (other / "link.py").symlink_to("it.py")
    own = commit(other)
    git(folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "sub")
    assert repository(folder).submodules(commit(folder)) == {"sub": own} and repository(folder).submodules(first) == {}
    inner = repository(folder / "sub")
    assert inner.top == folder / "sub" and inner.same(own) and not inner.same("0" * 40)
    (folder / "sub/it.py").write_text("it = 2\n")
    assert not inner.same(own)


@pytest.mark.parametrize(
    "rev",
    ["nowhere", "HEAD~9", "--all", "-h", "--output=/tmp/x", "", "HEAD:kept.py", "a\0b", "HEAD\nHEAD", "$(touch x)"],
)
def test_a_revision_that_git_does_not_know_is_refused(here, rev):
    with pytest.raises(BadRevision, match="localtensor gate: --changed: ") as refused:
        repository(here[0]).commit(rev)
    assert repr(rev) in str(refused.value)


def test_a_shallow_clone_is_told_what_to_do(here):
    with pytest.raises(BadRevision) as refused:
        repository(here[0]).commit("origin/main")
    assert str(refused.value) == (
        "localtensor gate: --changed: 'origin/main': git knows no such commit. "
        "Name a branch, a tag or a commit; in CI, fetch it first (actions/checkout: fetch-depth: 0)."
    )


def test_a_repository_without_commits_has_no_revisions(tmp_path):
    git(tmp_path, "init", "-q")
    assert repository(tmp_path).files() == ()
    with pytest.raises(BadRevision, match="git knows no such commit"):
        repository(tmp_path).commit("HEAD")


def test_a_folder_outside_of_a_repository_is_refused_with_what_git_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(NoRepository) as refused:
        repository(tmp_path)
    assert str(refused.value).startswith(
        f"localtensor gate: folder: {tmp_path}: no work tree of a git repository (not a git repository"
    )
    assert str(refused.value).endswith("Run in a clone, or leave out --changed.")


def test_a_bare_repository_and_a_folder_that_is_not_there_are_refused(tmp_path):
    git(tmp_path, "init", "-q", "--bare", "bare.git")
    with pytest.raises(NoRepository, match="must be run in a work tree"):
        repository(tmp_path / "bare.git")
    with pytest.raises(NoRepository, match="there is no such folder"):
        repository(tmp_path / "nowhere")


def test_without_git_the_refusal_says_so(here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(NoGit) as refused:
        repository(here[0])
    assert str(refused.value) == "localtensor gate: --changed: git: there is no such command. Install git."
    assert isinstance(refused.value, LocalTensorError)


def test_what_a_repository_configures_is_never_run(here):
    """Filters, watchers, pagers, diff drivers, hooks and an alias, each of which would leave a file."""
    folder, first = here
    trap = folder / "trap.sh"
    trap.write_text(f"#!/bin/sh\necho $0 >> '{folder}/sprung.log'\ncat\n")
    trap.chmod(trap.stat().st_mode | stat.S_IEXEC)
    for name in ("filter.trap.clean", "filter.trap.smudge", "filter.trap.process", "core.fsmonitor", "core.pager",
                 "diff.trap.textconv", "diff.external", "core.editor", "alias.ls-tree"):  # fmt: skip
        git(folder, "config", name, str(trap))
    git(folder, "config", "core.hooksPath", str(folder / "hooks"))
    (folder / "hooks").mkdir()
    for hook in ("post-index-change", "post-checkout", "reference-transaction"):
        (folder / "hooks" / hook).symlink_to(trap)
    (folder / ".gitattributes").write_text("* filter=trap diff=trap\n")
    (folder / "kept.py").write_text("kept = 3\n")
    found = repository(folder)
    files, blobs = found.files(), found.blobs(found.commit(first))
    assert "kept.py" in files and found.contents([blobs["kept.py"]]) == {blobs["kept.py"]: b"kept = 1\n"}
    assert not (folder / "sprung.log").exists()
    subprocess.run(["git", "status"], cwd=folder, capture_output=True, check=False)
    assert (folder / "sprung.log").exists(), "the traps do not work"


@pytest.mark.parametrize(
    "remote",
    [{"url": "ext::sh -c touch% {mark}"}, {"url": "{folder}", "uploadpack": "{trap}"}, {"url": "x", "vcs": "trap"}],
    ids=["ext", "uploadpack", "vcs"],
)
def test_a_partial_clone_fetches_nothing_and_runs_no_command_of_its_remote(here, tmp_path_factory, monkeypatch, remote):
    """git would ask the remote for a blob that is missing; which command that is, the repository's configuration says."""
    folder, first = here
    mark = tmp_path_factory.mktemp("outside") / "ran"
    trap = mark.with_name("git-remote-trap")
    trap.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    trap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{trap.parent}{os.pathsep}{os.environ['PATH']}")
    blob = repository(folder).blobs(first)["kept.py"]
    own = {f"remote.origin.{name}": value.format(mark=mark, folder=folder, trap=trap) for name, value in remote.items()}
    partial = {"remote.origin.promisor": "true", "extensions.partialClone": "origin", "protocol.allow": "always"}
    for name, value in {**own, **partial, "core.repositoryFormatVersion": "1"}.items():
        git(folder, "config", name, value)
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(NoRepository) as refused:
        repository(folder).contents([blob])
    assert not mark.exists()
    assert str(refused.value).endswith(
        "this partial clone lacks the content of some files. Fetch it first: git fetch --refetch --no-filter."
    )
    subprocess.run(["git", "cat-file", "-p", blob], cwd=folder, capture_output=True, check=False)
    assert mark.exists(), "the trap does not work"


def test_the_environment_of_a_hook_does_not_lead_elsewhere(here, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    for name, value in {"GIT_DIR": other / ".git", "GIT_WORK_TREE": other, "GIT_INDEX_FILE": other / "x"}.items():
        monkeypatch.setenv(name, str(value))
    folder, first = here
    assert repository(folder).top == folder.resolve()
    assert "kept.py" in repository(folder).files()
    assert repository(folder).commit("HEAD~1") == first


def test_content_that_cannot_be_had_is_refused(here):
    folder, _ = here
    with pytest.raises(NoRepository, match="cannot be had"):
        repository(folder).contents(["0" * 40])


def test_a_repository_that_is_broken_is_refused(here, monkeypatch):
    folder, first = here
    found = repository(folder)
    blob = found.blobs(first)["kept.py"]
    path = folder / ".git/objects" / blob[:2] / blob[2:]
    path.chmod(0o644)
    path.write_bytes(b"no object")
    with pytest.raises(NoRepository, match=r"git cat-file fails|cannot be had"):
        found.contents([blob])
    assert git_tree.UNSET.isdisjoint({"PATH"}) and os.environ["PATH"]
