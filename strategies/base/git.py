"""Read access to a git repository: its location, the content of a revision, the files of the work tree.

It runs the git command without hooks, filters, pagers, file system monitors and remotes: no command that a repository
configures is executed, and nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localtensor.errors import Refusal

CALL = "localtensor gate"
UNSET = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"})
"""Variables that git sets for hooks. They are removed, so that the result depends on the folder only."""
QUIET = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-c", "core.quotePath=false")


CALM = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
    "GIT_ALLOW_PROTOCOL": "none",  # in a partial clone git would ask the remote, by a command that the repository names
    "GIT_NO_LAZY_FETCH": "1",  # the same for git 2.45 and later, without an attempt
}


class NoGit(Refusal, call=CALL, argument="--changed", values="git"):
    """The command `git` is not installed, or not on the path."""

    PROBLEM = "there is no such command"
    REMEDY = "Install git."


class NoRepository(Refusal, call=CALL, argument="folder"):
    """A folder that is in the work tree of no git repository."""


class BadRevision(Refusal, call=CALL, argument="--changed", values="{rev!r}"):
    """A revision that git does not know."""


@dataclass(frozen=True, slots=True)
class Repository:
    """The work tree that starts at `top`, an absolute path."""

    top: Path

    def commit(self, rev: str) -> str:
        """The full name of the commit that `rev` denotes. Raises `BadRevision`."""
        if not rev or rev.startswith("-") or any(sign in rev for sign in "\0\n"):
            raise BadRevision(rev, "no revision is written like this", "Name a branch, a tag or a commit.")
        found = _git(self.top, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
        if found.returncode:
            remedy = "Name a branch, a tag or a commit; in CI, fetch it first (actions/checkout: fetch-depth: 0)."
            raise BadRevision(rev, "git knows no such commit", remedy)
        return found.stdout.decode().strip()

    def files(self) -> tuple[str, ...]:
        """The paths of all files in the work tree that are not ignored, sorted; untracked files are included.

        Python bytecode is excluded even where the repository does not ignore it.
        """
        which = ("--cached", "--others", "--exclude-standard", "-x", "__pycache__/")
        listed = _git_output(self.top, "ls-files", *which, "-z")
        return tuple(sorted({name for name in _null_separated(listed) if (self.top / name).is_file()}))

    def blobs(self, commit: str) -> dict[str, str]:
        """The blob name of each file of the commit; without links and submodules."""
        return {path: name for mode, name, path in self._tree(commit) if mode.startswith("100")}

    def submodules(self, commit: str) -> dict[str, str]:
        """The commit of each submodule in this commit."""
        return {path: name for mode, name, path in self._tree(commit) if mode == "160000"}

    def _tree(self, commit: str) -> Iterator[tuple[str, str, str]]:
        """Mode, name and path of every entry of the commit."""
        for line in _null_separated(_git_output(self.top, "ls-tree", "-r", "-z", "--full-tree", commit)):
            about, _, path = line.partition("\t")
            mode, _, name = about.split(" ")
            yield mode, name, path

    def same(self, commit: str) -> bool:
        """Whether the work tree has the same files as the commit; False if git does not know the commit."""
        if _git(self.top, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
            return False
        blobs, today = self.blobs(commit), [path for path in self.files() if not (self.top / path).is_symlink()]
        if set(blobs) != set(today):
            return False
        return all(blob_name((self.top / path).read_bytes(), blob) == blob for path, blob in blobs.items())

    def contents(self, blobs: Sequence[str]) -> dict[str, bytes]:
        """The bytes of each blob as stored, without any filter of the repository."""
        if not blobs:
            return {}
        request = "".join(f"{blob}\n" for blob in blobs).encode()
        output, at, found = _git_output(self.top, "cat-file", "--batch", given=request), 0, {}
        for blob in blobs:
            end = output.index(b"\n", at)
            head = output[at:end].split(b" ")
            if len(head) != 3:
                raise _unreadable(self.top, f"the content of {blob} cannot be had")
            start = end + 1
            at = start + int(head[2]) + 1  # a line break follows the content
            found[blob] = output[start : at - 1]
        return found


def repository(folder: Path) -> Repository:
    """The repository whose work tree holds the folder. Raises `NoRepository` or `NoGit`."""
    found = _git(folder, "rev-parse", "--show-toplevel")
    if found.returncode:
        lines = found.stderr.decode(errors="replace").strip().splitlines() or ["git gives no reason"]
        problem = f"no work tree of a git repository ({lines[0].removeprefix('fatal: ')})"
        raise NoRepository(folder, problem, "Run in a clone, or leave out --changed.")
    return Repository(Path(found.stdout.decode(errors="surrogateescape").rstrip("\n")).resolve())


def blob_name(content: bytes, like: str) -> str:
    r"""The git blob name of that content, with the hash algorithm of the blob name `like`.

    >>> blob_name(b"hello\n", "0" * 40)
    'ce013625030ba8dba906f756967f9e9ca394464a'
    """
    kind = hashlib.sha256 if len(like) == 64 else hashlib.sha1
    return kind(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _null_separated(output: bytes) -> list[str]:
    return [name.decode(errors="surrogateescape") for name in output.split(b"\0") if name]


def _git_output(folder: Path, *command: str, given: bytes = b"") -> bytes:
    found = _git(folder, *command, given=given)
    if found.returncode:
        output = found.stderr.decode(errors="replace").strip()
        raise _unreadable(folder, f"git {command[0]} fails ({output})")
    return found.stdout


def _unreadable(folder: Path, problem: str) -> NoRepository:
    """The error for an object that git does not have: it is not fetched here, nor is a command of the remote run."""
    if _git(folder, "config", "--get-regexp", r"^remote\..*\.promisor$").stdout:
        problem = "this partial clone lacks the content of some files"
        return NoRepository(folder, problem, "Fetch it first: git fetch --refetch --no-filter.")
    return NoRepository(folder, problem, "Repair the repository (git fsck).")


def _git(folder: Path, *command: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in UNSET} | CALM
    try:
        whole = ["git", *QUIET, *command]
        return subprocess.run(whole, cwd=folder, env=environment, input=given, capture_output=True, check=False)
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise NoRepository(folder, "there is no such folder", "Name one that exists.") from error
        raise NoGit from error
