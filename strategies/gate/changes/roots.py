"""The statements that register an overload's rule with torch, and those that define the op where the project does."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from strategies.gate.changes.index import StatementIndex, references, registers
from strategies.gate.changes.module_model import Function, Statement
from strategies.gate.changes.normal_form import NormalForm


@dataclass(frozen=True, slots=True)
class Roots:
    """`units` in an order that does not depend on their positions; of them `defines` define the op, `rules` register
    its rule."""

    units: tuple[Statement, ...]
    defines: frozenset[Statement]
    rules: frozenset[Statement]


def roots_of(index: StatementIndex, op: str) -> Roots:
    """The project's statements about the overload `op`, such as `mine.scale.default`."""
    spellings = _OpSpellings(op)
    naming = {unit for unit in index.units if spellings.named_by(index.form(unit), unit)}
    found = {unit for unit in index.candidates if unit in naming}
    while more := {unit for unit in index.candidates if unit not in found and _joins(index, unit, found, naming)}:
        found |= more
    for unit in index.units:
        if index.form(unit).patches:
            late = False not in index.form(unit).patches
            found |= {unit, *index.starters(unit)} if not late or unit in index.at_import else set()
    order = sorted(found, key=lambda u: (index.skeleton(u), u.label, u.path, u.index))
    rules = frozenset(unit for unit in found if index.says_rule(unit))
    return Roots(tuple(order), frozenset(found & set(index.candidates)) - rules, rules)


def _joins(index: StatementIndex, unit: Statement, found: set[Statement], naming: set[Statement]) -> bool:
    """Whether a registering statement uses a statement that is found or names the op."""
    form = index.form(unit)
    tables = {u for u in naming | found if not isinstance(u.node, Function)}
    if any(u in tables for r in references([*form.head, *form.body]) for u in r.units):
        return True
    if any(u in found for u in form.written):
        return True
    plain = {u for u in found & index.registrars if isinstance(u.node, Function) and not _takes(u.node)}
    return any(u in plain for r in references([*form.head, *form.body]) for u in r.units)


def _takes(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function has arguments: then what it registers depends on the call."""
    args = node.args
    return bool(args.posonlyargs or args.args or args.kwonlyargs or args.vararg or args.kwarg)


class _OpSpellings:
    """The ways to name an overload: `torch.ops.mine.scale`, `"mine::scale"`, `"scale(Tensor x) -> Tensor"`."""

    def __init__(self, op: str) -> None:
        space, name, overload = op.split(".")
        self.chain = ["torch", "ops", space, name]
        self.overload = overload
        packet, space = re.escape(name), re.escape(space)
        self.text = re.compile(rf"(?:\s*{space}::|::|\s*)(?:{packet})(?:\.(\w*))?\s*(?:\(.*)?", re.DOTALL)

    def named_by(self, form: NormalForm, unit: Statement) -> bool:
        """Whether a statement names the overload; the body of a function only counts where it may register it."""
        late = isinstance(unit.node, Function) and not registers(form.body)
        if any(self._fits_name(name) for name, inside in form.outside if not (inside and late)):
            return True
        return any(self._fits_text(text) for text, inside in form.texts if not (inside and late))

    def _fits_name(self, name: str) -> bool:
        """Whether it is the overload, or its packet or namespace, from which a computed name may lead to the overload."""
        parts = name.split(".")
        whole = parts[:4] == self.chain[: len(parts)] and len(parts) > 1
        return whole and (len(parts) < 5 or parts[4] == self.overload or parts[4].startswith("_"))

    def _fits_text(self, text: str) -> bool:
        found = self.text.fullmatch(text)
        return found is not None and (found[1] is None or (found[1] or "default") == self.overload)
