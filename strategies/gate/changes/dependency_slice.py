"""The slice of an overload: every statement that its rule depends on in one version, as one canonical text.

The statements that register an overload's rule with torch, and those that define the op where the project does.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from strategies.gate.changes.index import StatementIndex, references, registers
from strategies.gate.changes.module_model import Function, Statement
from strategies.gate.changes.normal_form import NormalForm, Reference, Token


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


RULE, OP, REGISTRATION, TEST = "its rule", "the op", "its registration", "its test"


@dataclass(frozen=True, slots=True)
class SliceStatement:
    """One statement of a slice: its `head` and `body` with references as the names that their targets bind.

    `origin` names the root that it is reached from: the rule, the op itself, or the registration.
    """

    unit: Statement
    origin: str
    root: bool
    head: str
    body: str


@dataclass(frozen=True, slots=True)
class Slice:
    """`text` is equal for slices of the same behaviour.  `doubts` are reasons why other statements may matter."""

    parts: tuple[SliceStatement, ...]
    text: str
    doubts: tuple[str, ...] = ()
    outside: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class RuleNames:
    """The names of today's rule functions: this overload's own, and those of others, which do not matter to it."""

    own: frozenset[str]
    others: frozenset[str]


Node = tuple[Statement, bool]
"""A statement, and whether it is reached from a registration: then rules of other overloads are mere names in it."""


class Slicer:
    """Makes the slice from these roots; `functions` are the statements that hold today's rule functions.

    `samples` are those that give the calls with which the rule is tested.
    """

    def __init__(
        self, index: StatementIndex, roots: Roots, rules: RuleNames, functions: Collection[Statement],
        samples: Sequence[Statement] = (),
    ) -> None:  # fmt: skip
        self.index, self.roots, self.rules, self.functions, self.samples = index, roots, rules, functions, samples
        self.numbers: dict[Node, int] = {}
        self.origins: dict[Node, str] = {}
        self.todo: deque[Node] = deque()
        self.doubts: dict[str, None] = {}
        self.outside: set[str] = set()

    def walk(self, lost: Sequence[Statement]) -> Slice:
        """The slice; `lost` are statements that no known root leads to: they are roots, too."""
        for unit in [*self.roots.units, *lost]:
            origin = OP if unit in self.roots.defines else RULE if unit in self.functions else REGISTRATION
            self._number((unit, True), origin)
        for unit in self.samples:
            self._number((unit, False), TEST)
        parts, lines = [], [f"{len(self.numbers)} roots", self._order()]
        while self.todo:
            node = self.todo.popleft()
            part, line = self._part(node)
            parts.append(part)
            lines.append(line)
        return Slice(tuple(parts), "\n".join(lines), tuple(self.doubts), frozenset(self.outside))

    def _number(self, node: Node, origin: str) -> str:
        if node not in self.numbers:
            self.numbers[node] = len(self.numbers)
            self.origins[node] = RULE if node[0] in self.functions else origin
            self.todo.append(node)
        return f"@{self.numbers[node]}"

    def _part(self, node: Node) -> tuple[SliceStatement, str]:
        unit = node[0]
        form, origin = self.index.form(unit), self.origins[node]
        self.doubts.update((f"{doubt} in {unit.path}", None) for doubt in form.doubts)
        self.outside.update(name for name, _ in form.outside)
        self.outside.update(token for token in [*form.head, *form.body] if isinstance(token, str) and token[:1] == ".")
        decorating = REGISTRATION if isinstance(unit.node, Function) and origin == RULE else origin
        tokens = [(token, decorating) for token in form.head]
        tokens += [(token, origin) for token in ("|", *form.body, "|")]
        line = [token if isinstance(token, str) else self._target_text(token, node, whence) for token, whence in tokens]
        changers = self.index.changers(unit)
        line += [self._number((changer, node[1] and not self._full(changer)), origin) for changer in changers]
        head, body = self._named(form.head, node), self._named(form.body, node)
        return SliceStatement(unit, origin, unit in self.roots.units, head, body), " ".join(line)

    def _target_text(self, reference: Reference, node: Node, origin: str) -> str:
        if self._opaque(reference, node):
            return f"~{reference.units[-1].label}"
        registering = self._registering(reference, node)
        numbers = ",".join(self._number((u, registering and not self._full(u)), origin) for u in reference.units)
        return numbers if reference.late else numbers + self._position(reference, node[0])

    def _position(self, reference: Reference, unit: Statement) -> str:
        """The number of statements before this one in its file that make up the referenced value; "" for a single one."""
        every = {u: None for one in reference.units for u in (one, *self.index.changers(one))}
        if len(every) < 2:
            return ""
        return f"^{sum(u.path == unit.path and u.index < unit.index for u in every)}"

    def _order(self) -> str:
        """The order in which rules are registered: the last one is in force."""
        rules = [u for u in self.roots.units if u in self.roots.rules and not _is_plain(u)]
        if len({u.path for u in rules}) > 1:
            self.doubts["several files register rules for it"] = None
        return " ".join(str(self.roots.units.index(u)) for u in sorted(rules, key=lambda u: (u.path, u.index)))

    def _registering(self, reference: Reference, node: Node) -> bool:
        """Whether a reference is evaluated when rules are registered, also in functions that register."""
        unit, registering = node
        return registering and reference.depth <= (unit in self.index.registrars)

    def _full(self, unit: Statement) -> bool:
        """Whether all of a statement runs later: the names in it may be called then."""
        return isinstance(unit.node, Function | ast.ClassDef) and unit not in self.index.registrars

    def _opaque(self, reference: Reference, node: Node) -> bool:
        """Whether it is a rule of other overloads, which a registration names beside this one's."""
        if reference.called or not self._registering(reference, node):
            return False
        label = reference.units[-1].label
        functions = all(isinstance(unit.node, Function) for unit in reference.units)
        return functions and label in self.rules.others and label not in self.rules.own

    def _named(self, tokens: list[Token], node: Node) -> str:
        return " ".join(t if isinstance(t, str) else self._label(t, node) for t in tokens)

    def _label(self, reference: Reference, node: Node) -> str:
        sign = "~" if self._opaque(reference, node) else "@"
        return ",".join(dict.fromkeys(sign + unit.label for unit in reference.units))


def _is_plain(unit: Statement) -> bool:
    """Whether it is a function without decorators, whose definition registers nothing."""
    return isinstance(unit.node, Function) and not unit.node.decorator_list
