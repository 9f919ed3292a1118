"""The scopes within a statement: which names are its own, and what they are called in its normal form."""

from __future__ import annotations

import ast

from strategies.gate.changes.module_model import Function, Imported


class Scope:
    """The names of a function, a comprehension or a class within the unit."""

    def __init__(
        self, depth: int, parameters: set[str], names: set[str], taken: set[str], links: dict[str, list[Imported]],
        *, of_class: bool = False,
    ) -> None:  # fmt: skip
        self.depth, self.parameters, self.names, self.taken, self.links = depth, parameters, names, taken, links
        self.of_class = of_class
        self._numbers: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def token(self, name: str) -> str:
        """A parameter may be given by its name, and a class has its attributes by name; a local is a number."""
        if self.of_class or name in self.parameters:
            return f"%{name}"
        return f"${self.depth}.{self._numbers.setdefault(name, len(self._numbers))}"


BINDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.ExceptHandler: ("name",), ast.MatchAs: ("name",), ast.MatchStar: ("name",), ast.MatchMapping: ("rest",),
}  # fmt: skip
NOWHERE = Scope(0, set(), set(), set(), {})


def parameters(args: ast.arguments) -> list[str]:
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]
    return [arg.arg for arg in listed]


def signature(args: ast.arguments) -> str:
    names = [[arg.arg for arg in group] for group in (args.posonlyargs, args.args, args.kwonlyargs)]
    return repr([*names, args.vararg and args.vararg.arg, args.kwarg and args.kwarg.arg])


def notes(node: Function) -> list[ast.expr | None]:
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    every = [*args, *filter(None, [node.args.vararg, node.args.kwarg])]
    return [*(a.annotation for a in every), node.returns]
