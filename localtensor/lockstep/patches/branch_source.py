"""The `if` statement, the assertion or the conditional expression of a source file that asks for a value on which the ranks differ.

It is found by the place of the expression that a frame evaluates, and compiled to functions of the local variables that it names: its
condition, and what follows where the condition holds and where it does not.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor
from torch.fx.experimental import sym_node

from localtensor._util.call_sites import is_user_file

_OURS = str(Path(__file__).parents[2])
_TESTS = str(Path(torch.__file__).with_name("testing") / "_internal")
"""torch's bases of tests, which tests inherit from."""
LEAVES = (
    ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.NamedExpr,
)  # fmt: skip
QUERIES = frozenset({
    "get_rank", "get_world_size", "get_local_rank", "get_coordinate", "is_initialized", "len", "int", "min", "max", "abs", "isinstance", "hasattr",
    "getattr", "type", "range", "tuple", "sum", "any", "all", "size", "numel", "dim", "item", "tolist", "get_group_rank", "startswith", "endswith",
})  # fmt: skip
"""Calls in a condition that may be made twice."""
_MAKERS = QUERIES | {
    "zeros", "ones", "full", "empty", "arange", "tensor", "zeros_like", "ones_like", "empty_like", "full_like", "clone", "view", "reshape", "to",
    "float", "bool", "str", "list", "dict", "set", "slice", "Size", "device", "chunk", "split", "narrow", "select", "unsqueeze", "squeeze", "cat",
    "stack", "detach", "contiguous", "Shard", "Replicate", "Partial",
}  # fmt: skip
"""Calls in an assigned expression that may be made more than once: they only make what they return."""
_SCOPES = ("locals", "vars", "exec", "eval")
BODY, TEST = "_for_some_ranks", "_condition_of_some_ranks"
_INNER = ("COMPARE_OP", "CONTAINS_OP")
_JUMPS = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")


@dataclass(frozen=True, slots=True)
class Branch:
    """A statement as functions of the local variables that it names; each returns all of them.  `reads` are all names that it reads.

    `test` returns whether the condition holds; `holds` and `otherwise` do what follows, and are None where that is nothing.  `leads` is what
    the expression that asks must be for the condition to hold.  `lasts` is whether the condition may ask again after the answer.  `arm` are
    the lines of what follows where it holds, if there is an `else`; (0, 0) without.  `lines` are those of the condition.  An assignment runs by itself as well, over `lines`, and its variables are assigned `again`.
    """

    test: CodeType
    holds: CodeType | None
    otherwise: CodeType | None
    reads: tuple[str, ...]
    variables: tuple[str, ...]
    assigns: tuple[str, ...]
    leads: bool
    lasts: bool
    lines: tuple[int, int]
    fails: bool = False  # an assertion
    again: bool = False
    whole: bool = False  # a comparison by itself, on which the ranks must agree
    arm: tuple[int, int] = (0, 0)


def asking_frame(*, of_numbers: bool = False) -> FrameType | None:
    """The frame of user code that asks, through the methods of SymInt as well if `of_numbers`; None if torch does."""
    frame: FrameType | None = sys._getframe(1)
    own = [
        one.__code__
        for one in (torch.SymBool.__bool__, torch.SymInt.__bool__, torch.SymInt.__index__, Tensor.__contains__)
    ]
    files = (_OURS, torch.__file__, sym_node.__file__) if of_numbers else _OURS
    while frame is not None and (frame.f_code in own or frame.f_code.co_filename.startswith(files)):
        frame = frame.f_back
    if frame is None or any(name.startswith("__compiled_fn") for name in frame.f_code.co_names):
        return None  # nor of what Dynamo has made of a function: its variables are elsewhere
    file = frame.f_code.co_filename
    return frame if is_user_file(file) or file.startswith(_TESTS) else None


def branch_at(frame: FrameType) -> Branch | None:
    """The statement whose condition the frame asks for, if it can be run for some ranks."""
    code = frame.f_code
    place = position(frame)
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    own = None if frame.f_locals is frame.f_globals else (*code.co_varnames, *code.co_cellvars)
    asks, argument = dis.opname[code.co_code[frame.f_lasti]], code.co_code[frame.f_lasti + 1]
    if place is None or not asks.startswith((*_INNER, *_JUMPS)):
        return None
    text = "".join(lines)
    inner = asks in _INNER
    if asks == "COMPARE_OP" and sys.version_info >= (3, 13) and argument & 16:  # it makes a bool of its result, too
        inner = _compares_containers(frame, text, place)
    return _branch(text, code.co_filename, place, own, code.co_freevars, inner)


def _compares_containers(frame: FrameType, text: str, place: tuple[int, ...]) -> bool:
    for node in ast.walk(tree_of(text) or ast.Module([], [])):
        if isinstance(node, ast.Compare) and is_at(node, place) and are_calls_of(node, QUERIES):
            operands = [compile(ast.Expression(one), "", "eval") for one in (node.left, *node.comparators)]
            scope = dict(frame.f_locals)
            return any(isinstance(eval(one, frame.f_globals, scope), list | tuple | dict | set) for one in operands)  # noqa: S307
    return False


def position(frame: FrameType) -> tuple[int, ...] | None:
    """The lines and columns of the expression that is asked; on Python 3.10 the line alone."""
    if not hasattr(frame.f_code, "co_positions"):
        return (frame.f_lineno,)
    place = next(iter([*frame.f_code.co_positions()][frame.f_lasti // 2 :]), None)
    return None if place is None or None in place else tuple(at for at in place if at is not None)


@functools.lru_cache(512)
def tree_of(text: str) -> ast.Module | None:
    """The syntax tree of a file's text; None if it cannot be parsed."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(512)
def _branch(
    text: str, file: str, place: tuple[int, ...], own: tuple[str, ...] | None, free: tuple[str, ...], inner: bool
) -> Branch | None:
    """The statement in a text whose condition is at this place, in a function with variables of its `own` and `free` ones.

    At the top of a module `own` is None.
    """
    tree = tree_of(text)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert | ast.Assign | ast.AnnAssign):
            for owner, test in _conditions(node):
                leads = _answer(owner, test, place, inner=inner)
                if leads is not None:
                    return branch_of(
                        node, test, (leads, inner), (text, file), (None if own is None else {*own}, {*free})
                    )
    return next(_comparisons(tree, file, place, {*(own or ()), *free}), None) if inner else None


def _comparisons(tree: ast.Module, file: str, place: tuple[int, ...], local: set[str]) -> Iterator[Branch]:
    """The comparison of containers at this place, wherever it stands: the ranks may agree on it as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and is_at(node, place) and are_calls_of(node, QUERIES):
            leads = _answer(node, node, place, inner=True)
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            if leads is not None:
                tested = _function(TEST, sorted(names & local), _test_of(node), file)
                lines = (node.lineno, node.end_lineno or node.lineno)
                yield Branch(
                    tested,
                    None,
                    None,
                    tuple(sorted(names)),
                    tuple(sorted(names & local)),
                    (),
                    leads,
                    True,
                    lines,
                    whole=True,
                )


def _conditions(node: ast.stmt) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr]]:
    """The conditions of a statement, each with what has it."""
    if isinstance(node, ast.If | ast.Assert):
        yield node, node.test
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        yield from ((one, one.test) for one in in_this_scope(node.value) if isinstance(one, ast.IfExp))


def in_this_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes beneath, but those of functions and comprehensions: they have frames of their own, or run several times."""
    if not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        yield node
        for one in ast.iter_child_nodes(node):
            yield from in_this_scope(one)


def _answer(node: ast.stmt | ast.expr, test: ast.expr, place: tuple[int, ...], *, inner: bool) -> bool | None:
    """What the expression at this place must be for the condition to hold; None if the condition does not ask for it."""
    whole = is_at(
        node, place
    )  # on Python 3.11 the jump has the place of the statement, or of the conditional expression
    answers = set()
    for one, leads in _asked(test, leads=True):
        if whole or is_at(one, place):
            operators = one.ops if isinstance(one, ast.Compare) else []
            backwards = (ast.NotIn, ast.NotEq) if inner else ()  # a part of a container is compared
            unclear = inner and (
                len(operators) > 1 or not isinstance(operators[0], ast.In | ast.NotIn | ast.Eq | ast.NotEq)
            )
            answers.add(None if unclear else leads is not isinstance(operators[0] if operators else None, backwards))
    return answers.pop() if len(answers) == 1 else None


def _asked(test: ast.expr, *, leads: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a condition, each with what it must be for the condition to hold: those of `and`, `or` and `not`."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _asked(value, leads=leads)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _asked(test.operand, leads=not leads)
    else:
        yield test, leads


def is_at(node: ast.expr | ast.stmt, place: tuple[int, ...]) -> bool:
    """Whether a node is at a place that `position` gives."""
    if len(place) == 1:
        return node.lineno == place[0]
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place


@functools.lru_cache(512)
def names_read(code: CodeType) -> frozenset[str]:
    """The variables that one of the functions of a `Branch` reads.

    >>> sorted(names_read((lambda a, b, c: [a, [c for b in a]]).__code__))
    ['a', 'c']
    """
    found: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname.startswith(("LOAD_", "STORE_FAST_LOAD", "MAKE_CELL")):
            found.update(one.argval if isinstance(one.argval, tuple) else (one.argval,))
    return frozenset(found & {*code.co_varnames, *code.co_cellvars})


def _is_fit(node: ast.stmt, test: ast.expr, free: set[str]) -> bool:
    """Whether the statement stays in its function, sets no attribute, and has a condition that may be evaluated twice."""
    assertion = isinstance(node, ast.Assert)
    body = [] if assertion else [one for one in ast.walk(node) if one is not node]
    leaves = any(isinstance(one, LEAVES) for one in (*body, *ast.walk(test)))
    shared = any(isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store) for one in body)
    named = any(isinstance(one, ast.Name) and one.id in ("super", *_SCOPES) for one in body)
    private = any(
        isinstance(one, ast.Attribute) and one.attr.startswith("__") and not one.attr.endswith("__")
        for one in (*body, *ast.walk(test))
    )
    often = _MAKERS if isinstance(node, ast.Assign | ast.AnnAssign) else None  # the statement itself runs, too
    again = are_calls_of(test, QUERIES) and (often is None or are_calls_of(node, often))
    assigned = {one.id for one in body if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return not (leaves or shared or named or private or assigned & free) and again


def _shares_lines(node: ast.stmt, text: str) -> bool:
    """Whether another statement begins in its lines: `x = 1 if c else 2; y = x` has no line behind the first."""
    own = {id(one) for one in ast.walk(node)}
    others = (one for one in ast.walk(tree_of(text) or node) if isinstance(one, ast.stmt) and id(one) not in own)
    return any(node.lineno <= one.lineno <= (node.end_lineno or 0) for one in others)


def are_calls_of(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether all calls within a node are of functions or methods with these names."""
    return all(_name_of(one.func) in names for one in ast.walk(node) if isinstance(one, ast.Call))


def _name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _loop_names(node: ast.stmt, text: str) -> set[str]:
    """The variables of `for` loops within the statement that its function reads nowhere else: they need no value behind it."""
    around = [one for one in ast.walk(tree_of(text) or ast.Module([], [])) if isinstance(one, ast.FunctionDef)]
    around = [one for one in around if any(each is node for each in ast.walk(one))]
    if not around or any(isinstance(one, ast.Name) and one.id in _SCOPES for one in ast.walk(around[0])):
        return set()
    loops = [one for one in ast.walk(node) if isinstance(one, ast.For)]
    named = {
        name: {id(x) for one in loops if name in _names_in(one.target) for part in one.body for x in ast.walk(part)}
        for name in {name for one in loops for name in _names_in(one.target)}
    }
    read = [one for one in ast.walk(around[0]) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)]
    read += [
        one.target for one in ast.walk(around[0]) if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)
    ]
    return {name for name, within in named.items() if all(id(one) in within for one in read if one.id == name)}


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def branch_of(
    node: ast.stmt,
    test: ast.expr,
    asked: tuple[bool, bool],
    source: tuple[str, str],
    local: tuple[set[str] | None, set[str]],
) -> Branch | None:
    """The statement as a `Branch`; None if its two ways cannot be run as functions.

    `asked` are `leads` and whether the asking expression is part of another; `source` are the text and its file, `local`
    the function's own variables (None in a module) and those of functions around it.
    """
    own, free = local
    if not _is_fit(node, test, free) or _shares_lines(node, source[0]):
        return None
    (leads, inner), (text, file) = asked, source
    names = [one for one in ast.walk(test if isinstance(node, ast.Assert) else node) if isinstance(one, ast.Name)]
    loop_names = set() if own is None else _loop_names(node, text)
    own_names = (one for one in in_this_scope(node) if isinstance(one, ast.Name))
    assigns = {one.id for one in own_names if isinstance(one.ctx, ast.Store)} | set(_imported(node))
    if own is not None and not isinstance(node, ast.Assert) and not assigns <= own | free:
        return None  # a global variable
    variables = sorted({one.id for one in names if one.id in (own or set()) | free} | assigns)
    assigns -= loop_names
    reads = tuple(sorted({one.id for one in names if isinstance(one.ctx, ast.Load)}))
    line = (node.end_lineno or 0) + 1

    def function(body: list[ast.stmt]) -> CodeType | None:
        return (
            _function(BODY, variables, [*body, *_on_line(ast.parse("return locals()").body, line)], file)
            if body
            else None
        )

    asks = [*_asked(test, leads=True)]
    lasts = (
        inner
        or len(asks) > 1
        or any(isinstance(one, ast.Compare | ast.Call) and not _asks_once(one) for one, _ in asks)
    )
    whole = node if isinstance(node, ast.Assign | ast.AnnAssign) else test
    lines = (whole.lineno, whole.end_lineno or whole.lineno)
    common = (reads, tuple(variables), tuple(sorted(assigns)), leads, lasts, lines)
    tested = _function(TEST, variables, _test_of(test), file)
    if isinstance(node, ast.If):
        arm = (node.body[0].lineno, node.body[-1].end_lineno or 0) if node.orelse else (0, 0)
        if node.orelse and arm[0] <= lines[1]:
            return None  # no line event comes before it
        return Branch(tested, function(node.body), function(node.orelse), *common, arm=arm)
    if isinstance(node, ast.Assert):
        return Branch(tested, None, None, *common, fails=True)
    arms = [function([_Chosen(test, holds).visit(copy.deepcopy(node))]) for holds in (True, False)]
    return Branch(tested, arms[0], arms[1], *common, again=True)


class _Chosen(ast.NodeTransformer):
    """The statement with one arm of each conditional expression of this condition."""

    def __init__(self, test: ast.expr, holds: bool) -> None:
        self._test, self._holds = ast.dump(test), holds

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:  # the name of ast
        if ast.dump(node.test) == self._test:
            return self.visit(node.body if self._holds else node.orelse)  # type: ignore[no-any-return]
        return self.generic_visit(node)


def _asks_once(one: ast.expr) -> bool:
    if not isinstance(one, ast.Compare):
        return False
    parts = [one.left, *one.comparators]
    return (
        len(one.ops) == 1
        and not isinstance(one.ops[0], ast.In | ast.NotIn)
        and not any(isinstance(x, ast.List | ast.Tuple) for x in parts)
    )


def _test_of(test: ast.expr) -> list[ast.stmt]:
    body = _on_line(ast.parse("return not not None").body, test.lineno)
    body[0].value.operand.operand = test  # type: ignore[attr-defined]
    return body


def _on_line(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    for one in ast.walk(ast.Module(body, [])):
        if isinstance(one, ast.stmt | ast.expr):
            one.lineno = one.end_lineno = line
    return body


def _function(name: str, variables: Sequence[str], body: list[ast.stmt], file: str) -> CodeType:
    arguments = ast.arguments([], [ast.arg(one) for one in variables], None, [], [], None, [])
    made = ast.FunctionDef(name, arguments, body, [], None)
    made.type_params = []  # type: ignore[attr-defined]
    module = compile(ast.fix_missing_locations(ast.Module([made], [])), file, "exec")
    return next(one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == name)


def _imported(node: ast.stmt) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in one.names)
