"""The Python files of the project at hand, today and at a revision, and where its imports start."""

from __future__ import annotations

import ast
import posixpath
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from strategies.base.git import NoGit, NoRepository, Repository, blob_name, repository
from strategies.gate.changes.changed_tree import Version

TORCH, JUDGED = Path(torch.__file__).resolve().parent, "distributed/tensor"
"""Where torch keeps DTensor's rules; the rest of torch is outside, also where torch is the project."""
Trees = dict[tuple[str, bytes], ast.Module | None]


@dataclass(frozen=True, slots=True)
class Project:
    """A folder and its Python files, by path within it; `git` is None where there is no repository."""

    top: Path
    files: tuple[str, ...]
    git: Repository | None = None

    def path_of(self, file: str | None) -> str:
        """A file's path within the project; empty if it is none of its Python files."""
        if not file or not Path(file).is_absolute():
            return ""
        for path in (Path(file), Path(file).resolve()):
            if path.is_relative_to(self.top) and path.relative_to(self.top).as_posix() in self.files:
                return path.relative_to(self.top).as_posix()
        return ""

    def roots(self, modules: Iterable[str], folder: Path | None = None) -> list[str]:
        """The folders of the project from which Python imports: those of these modules, then those of its path."""
        places = [str(folder)] if folder else []
        places += [_root(name, sys.modules[name].__file__ or "") for name in modules if name in sys.modules]
        places += [entry or "." for entry in sys.path]
        found = []
        for place in places:
            path = Path(place).resolve()
            if place and path.is_relative_to(self.top):
                relative = path.relative_to(self.top).as_posix()
                found.append("" if relative == "." else relative)
        return list(dict.fromkeys(found))

    def today(self, roots: list[str], trees: Trees) -> Version:
        return Version({path: (self.top / path).read_bytes() for path in self.files}, roots, trees)

    def at(self, commit: str, now: Version, trees: Trees) -> Version:
        """The same at a commit of its repository."""
        assert self.git is not None
        blobs = {path: blob for path, blob in self.git.blobs(commit).items() if counts(self.top, path)}
        same = {p for p, blob in blobs.items() if p in now.texts and blob_name(now.texts[p], blob) == blob}
        old = self.git.contents(sorted({blob for path, blob in blobs.items() if path not in same}))
        texts = {path: now.texts[path] if path in same else old[blob] for path, blob in blobs.items()}
        return Version(texts, now.roots, trees)


def of_repository(git: Repository) -> Project:
    return Project(git.top, tuple(path for path in git.files() if counts(git.top, path)), git)


def counts(top: Path, path: str) -> bool:
    """Whether a path is that of a Python file of the project itself, not of an environment that lies within it."""
    if not path.endswith(".py") or "site-packages" in path.split("/"):
        return False
    file = top / path
    return not file.is_relative_to(TORCH) or file.is_relative_to(TORCH / JUDGED)


def of_module(name: str) -> Project | None:
    """The project that an imported module is part of: its repository, or the package that it lies in."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return None
    return in_repository(file) or _package(name, Path(file).resolve())


def in_repository(file: str) -> Project | None:
    """The repository that a file is part of, if it is part of one."""
    try:
        project = of_repository(repository(Path(file).resolve().parent))
    except (NoRepository, NoGit):
        return None
    return project if project.path_of(file) else None


def _package(name: str, file: Path) -> Project | None:
    root = _root(name, str(file))
    if not root:
        return None
    top, package = Path(root), name.partition(".")[0]
    found = [path.relative_to(top).as_posix() for path in sorted((top / package).rglob("*.py"))]
    return Project(top, (*found, *([f"{package}.py"] if (top / f"{package}.py").is_file() else [])))


def _root(name: str, file: str) -> str:
    """The folder from which a module was imported, by its name and its file; empty if the two do not fit."""
    stem = posixpath.splitext(Path(file).as_posix())[0].removesuffix("/__init__")
    parts = name.replace(".", "/")
    return stem.removesuffix(f"/{parts}") if stem.endswith(f"/{parts}") else ""
