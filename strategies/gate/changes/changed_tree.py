"""One version of a project's Python files: their texts, and which file a dotted name means."""

from __future__ import annotations

import ast
import posixpath
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.gate.changes.module_model import Module, module_of


@dataclass(frozen=True, slots=True)
class Place:
    """What a dotted name means: a file, or (`file` empty) a folder without an `__init__.py`."""

    file: str
    folder: str
    """That in which its submodules lie; empty for a module that can have none."""


class Version:
    """The files of one version by path, with slashes, and the folders from which imports start, first ones first.

    `shared` keeps what is parsed, by content, for all versions that are given the same.
    """

    def __init__(
        self, texts: Mapping[str, bytes], roots: Sequence[str], shared: dict[tuple[str, bytes], ast.Module | None]
    ) -> None:
        self.texts, self.roots = texts, tuple(roots)
        self.unparsed: set[str] = set()
        self._folders = {folder for path in texts for folder in above(path)}
        self._modules: dict[str, Module] = {}
        self._shared = shared

    def module(self, path: str) -> Module:
        """The module in that file; one without statements, and `unparsed` has its path, if it is no Python."""
        if path not in self._modules:
            tree = self.tree(path)
            if tree is None:
                self.unparsed.add(path)
            self._modules[path] = module_of(path, tree or ast.Module([], []))
        return self._modules[path]

    def tree(self, path: str) -> ast.Module | None:
        key = (path, self.texts[path])
        if key not in self._shared:
            self._shared[key] = _parsed(self.texts[path])
        return self._shared[key]

    def find(self, dotted: str, base: str | None) -> Place | None:
        """What a module's name means; `base` is the folder that a relative import starts from, None if it is not."""
        if base is not None and not dotted:
            return self._at(base) if base else None
        relative = dotted.replace(".", "/")
        for root in self.roots if base is None else (base,):
            place = self._at(posixpath.join(root, relative) if root else relative)
            if place is not None:
                return place
        return None

    def below(self, place: Place, name: str) -> Place | None:
        """A submodule."""
        return self._at(posixpath.join(place.folder, name)) if place.folder else None

    def _at(self, path: str) -> Place | None:
        if f"{path}/__init__.py" in self.texts:
            return Place(f"{path}/__init__.py", path)
        if f"{path}.py" in self.texts:
            return Place(f"{path}.py", "")
        return Place("", path) if path in self._folders else None


def _parsed(text: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in a text of theirs is no matter of ours
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def above(path: str) -> Iterator[str]:
    """The folders that the file lies in."""
    folder = posixpath.dirname(path)
    while folder:
        yield folder
        folder = posixpath.dirname(folder)
