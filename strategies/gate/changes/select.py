"""`--changed REV`: the overloads whose rules, callees, registrations or ops changed since a revision.

Files are compared by content, statement by statement, from the registration of an overload through all that it reaches
within the repository.  No code of the revision is imported or run.  Code outside of the repository counts as unchanged,
torch too, unless it is the repository.  The reason for a choice names the nearest statement in which the slices differ.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from strategies.base.git import Repository, blob_name, repository
from strategies.gate.baseline import ChosenOverload
from strategies.gate.changes.dependency_slice import OP, REGISTRATION, RULE, TEST, Slice, SliceStatement
from strategies.gate.changes.module_model import Function, Statement
from strategies.gate.changes.project import Project, Trees, project_of_repository, start_files
from strategies.gate.changes.version_view import RuleDependencies, VersionView, functions_in_project


def change_reason(now: Slice, then: Slice, functions: Collection[Statement], makers: Collection[Statement]) -> str:
    """What changed from `then` to `now`; `functions` hold today's rule functions, `makers` are functions around them.

    The rule function itself comes first, then its registration, the op, and their dependencies, the nearest first.
    """
    namesakes: dict[str, list[SliceStatement]] = defaultdict(list)
    for part in then.parts:
        namesakes[part.unit.label].append(part)
    ranked = [
        (part.unit.label not in namesakes, _rank(part, functions, makers), number, part)
        for number, part in enumerate(now.parts)
        if all((other.head, other.body) != (part.head, part.body) for other in namesakes.get(part.unit.label, ()))
    ]
    if ranked:
        part = min(ranked, key=lambda r: r[:3])[3]
        return _describe(part, namesakes.get(part.unit.label, ()), functions, makers)
    texts = {(part.unit.label, part.head, part.body) for part in now.parts}
    gone = next((p for p in then.parts if (p.unit.label, p.head, p.body) not in texts), None)
    if gone is None:
        return "what it depends on stands in another order"
    if gone.origin == REGISTRATION:
        return "its registration changed"
    return f"{_called(gone.unit)}, on which {gone.origin} depended, is gone"


def _rank(part: SliceStatement, functions: Collection[Statement], makers: Collection[Statement]) -> int:
    if part.unit in functions:
        return int(part.unit in makers)
    return 2 + (part.origin == OP) if part.root else 4


def _describe(
    part: SliceStatement,
    namesakes: Sequence[SliceStatement],
    functions: Collection[Statement],
    makers: Collection[Statement],
) -> str:
    unit, node = part.unit, part.unit.node
    what = _verb_phrase(part, namesakes)
    if part.unit in makers:
        return f"{_called(unit)}, which makes its rule function, {what}"
    if part.unit in functions:
        if isinstance(node, Function) and not namesakes:
            return f"its rule function is now {_called(unit)}"
        if isinstance(node, Function) and any(other.body == part.body for other in namesakes):
            return "its registration changed"
        name = f" `{unit.label}`" if unit.label else f" on line {node.lineno} of {unit.path}"
        return f"its rule function{name} {what}"
    if part.root and part.origin == OP:
        return f"{_called(unit)}, which defines the op, {what}"
    if part.root:
        return "its registration changed"
    if isinstance(node, Function):
        return f"{_called(unit)}, which {part.origin} calls, {what}"
    if isinstance(node, ast.ClassDef):
        return f"the class {_called(unit)}, which {part.origin} uses, {what}"
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and unit.label:
        reader = "it" if part.origin == RULE else part.origin
        return f"the constant {unit.label} that {reader} reads {what}"
    return f"{_called(unit)}, on which {part.origin} depends, {what}"


def _verb_phrase(part: SliceStatement, namesakes: Sequence[SliceStatement]) -> str:
    """Whether its text changed, or only the meaning of one of its names."""
    text = f"{part.head} {part.body}"
    for other in namesakes:
        before = f"{other.head} {other.body}"
        if _LEAD.sub("", before) == _LEAD.sub("", text):
            news = [name for name in _LEAD.findall(text) if name not in _LEAD.findall(before)]
            return f"now refers to `{news[0]}`" if news and news[0] else "changed"
    return "changed"


_LEAD = re.compile(r"(?<=@)\w*")


def _called(unit: Statement) -> str:
    if unit.label and isinstance(unit.node, Function | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return f"`{unit.label}` in {unit.path}"
    return f"line {unit.node.lineno} of {unit.path}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The overloads to test, each with its reason, and the others; both in the given order."""

    choices: tuple[ChosenOverload, ...]
    unchanged: tuple[str, ...]


def select_changed(rev: str, folder: Path, module: str | None, ops: Sequence[str]) -> Selection:
    """Select those of `ops` (`mine.scale.default`) that changed between `rev` and the files as they are now.

    `module` is the imported module that registers rules, None for torch's own.  Raises `NoRepository`, `BadRevision` or
    `NoGit`.
    """
    git = repository(folder)
    commit = git.commit(rev)
    project = project_of_repository(git)
    written = functions_in_project(project)
    start = start_files(project, module, written if module is None else {op: written.get(op, []) for op in ops})
    if not start:
        return Selection((), tuple(ops))
    trees: Trees = {}
    now = project.today(project.roots([module] if module else [], folder), trees)
    then = project.at(commit, now, trees)
    sampler = project.path_of(getattr(sys.modules.get(module), "__file__", None)) if module else ""
    views = (
        VersionView(now, start, written, sampler),
        VersionView(then, [path for path in start if path in then.texts], sampler=sampler),
    )
    compared = _Comparison(project, git, commit, rev, *views)
    if not compared.differs():
        return Selection((), tuple(ops))
    reasons = {op: compared.reason(op) for op in ops}
    choices = tuple(ChosenOverload(op, reasons[op]) for op in ops if reasons[op])
    return Selection(choices, tuple(op for op in ops if not reasons[op]))


class _Comparison:
    """Today's version compared with that of the revision."""

    def __init__(
        self, project: Project, git: Repository, commit: str, rev: str, now: VersionView, then: VersionView
    ) -> None:
        self.project, self.git, self.commit, self.rev, self.now, self.then = project, git, commit, rev, now, then

    @functools.cached_property
    def submodules(self) -> list[str]:
        """The submodules whose files differ from those at the revision."""
        git = self.git
        before, after = git.submodules(self.commit), git.submodules("HEAD")
        there = {path: before.get(path, "") for path in {*before, *after} if (git.top / path / ".git").exists()}
        return sorted(path for path, own in there.items() if not Repository(git.top / path).same(own))

    def differs(self) -> bool:
        """Whether any imported file differs, or any other that may be read."""
        now, then = self.now, self.then
        same = now.files == then.files and all(now.version.texts[p] == then.version.texts[p] for p in now.files)
        return not same or bool(self.other_files or self.submodules)

    def reason(self, op: str) -> str:
        """Why the overload is to be tested; empty if nothing of it changed."""
        functions, rules = self.now.functions(op), self.now.rules(op)
        seen = self.now.seen(op, rules, functions)
        before = self.then.seen(op, rules, lost=self._namesakes(seen.lost))
        if seen.slice.text != before.slice.text:
            return self._difference(op, seen, before, functions)
        return self._possible_change(seen)

    def _namesakes(self, units: Sequence[Statement]) -> list[Statement]:
        """The statements of the revision that bind the same names in the same files."""
        version = self.then.version
        there = [unit for unit in units if unit.path in version.texts]
        return [one for unit in there for one in version.module(unit.path).binders.get(unit.label, ())]

    def _difference(
        self, op: str, seen: RuleDependencies, before: RuleDependencies, functions: Sequence[Statement]
    ) -> str:
        bad = {part.unit.path for part in seen.slice.parts} & self.then.version.unparsed
        if bad:
            return f"{min(bad)} could not be parsed at {self.rev}"
        if all(part.origin == TEST for part in before.slice.parts):
            return f"new since {self.rev}"
        if all(part.origin == TEST for part in seen.slice.parts):
            return "its registration is gone"
        return change_reason(seen.slice, before.slice, functions, self.now.makers(op))

    def _possible_change(self, seen: RuleDependencies) -> str:
        """A change outside of the slice that may matter: of any module, or of any file."""
        if seen.doubts:
            now, then = self.now.whole(), self.then.whole()
            other = sorted(path for path in {*now, *then} if now.get(path) != then.get(path))
            if other:
                return f"could not be told apart: {seen.doubts[0]}, and {other[0]} changed"
        used = self._used_submodule(seen)
        if used:
            return f"the submodule {used}, which it uses, changed"
        if seen.reads:
            files = [*self.other_files, *self.submodules]
            if files:
                return f"could not be told apart: {seen.reads}, and {files[0]} changed"
        return ""

    def _used_submodule(self, seen: RuleDependencies) -> str:
        """A changed submodule that a name from outside of the project is imported from; "" if there is none."""
        names = {*seen.slice.outside, *(self.now.libraries() if seen.foreign else ())}
        every = {above for name in names for above in itertools.accumulate(name.split("."), "{}.{}".format)}
        modules = [sys.modules.get(name) for name in every]
        files = [Path(file).resolve() for module in modules if (file := getattr(module, "__file__", None))]
        tops = {path: self.project.top / path for path in self.submodules}
        return next((path for path, top in tops.items() if any(file.is_relative_to(top) for file in files)), "")

    @functools.cached_property
    def other_files(self) -> list[str]:
        """The changed files of the repository that the rules do not import."""
        git, imported = self.git, set(self.now.files)
        blobs = {path: blob for path, blob in git.blobs(self.commit).items() if path not in imported}
        today = set(git.files()) - imported
        same = {p for p in today & blobs.keys() if blob_name((git.top / p).read_bytes(), blobs[p]) == blobs[p]}
        return sorted((today | blobs.keys()) - same)
