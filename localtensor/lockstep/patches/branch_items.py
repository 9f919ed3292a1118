"""What asks for a number of each rank: the item of a list, or an assignment, which then runs for each kind of rank."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from types import CodeType, FrameType

import torch

from localtensor.lockstep.patches.branch_source import (
    LEAVES,
    QUERIES,
    Branch,
    are_calls_of,
    branch_of,
    in_this_scope,
    is_at,
    position,
    tree_of,
)


def list_at(frame: FrameType) -> list[object] | None:
    """The list from which the frame takes one item, if it is named without a call, and its index is an int and no slice."""
    place = position(frame)
    if place is None or not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("BINARY_SUBSCR"):
        return None
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    codes = _container(text, frame.f_code.co_filename, place)
    if codes is None:
        return None
    scope = dict(frame.f_locals)
    found, again, index = (eval(codes[at], frame.f_globals, scope) for at in (0, 0, 1))  # noqa: S307  # expressions of the frame's own
    one_list = type(found) is list and found is again  # not one that a property makes each time
    return found if one_list and isinstance(index, torch.SymInt) else None


@functools.lru_cache(512)
def _container(text: str, file: str, place: tuple[int, ...]) -> tuple[CodeType, CodeType] | None:
    """What the subscript at this place takes an item from, and its index; None unless both may be evaluated twice."""
    tree = tree_of(text)
    found = [one for one in ast.walk(tree) if isinstance(one, ast.Subscript) and is_at(one, place)] if tree else []
    if len(found) != 1 or not isinstance(found[0].ctx, ast.Load):
        return None
    plain = (ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.expr_context)
    index = found[0].slice
    again = are_calls_of(index, QUERIES) and not any(isinstance(one, (*LEAVES, ast.Slice)) for one in ast.walk(index))
    if not again or not all(isinstance(one, plain) for one in ast.walk(found[0].value)):
        return None
    return compile(ast.Expression(found[0].value), file, "eval"), compile(ast.Expression(index), file, "eval")


def assignment_at(frame: FrameType) -> Branch | None:
    """The assignment that asks for a number of each rank, if it may be evaluated several times: `mine = x.chunk(4)[rank]`."""
    code, place = frame.f_code, position(frame)
    if place is None:
        return None
    own = None if frame.f_locals is frame.f_globals else (*code.co_varnames, *code.co_cellvars)
    text = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    return _assignment(text, code.co_filename, place, own, code.co_freevars)


@functools.lru_cache(512)
def _assignment(
    text: str, file: str, place: tuple[int, ...], own: tuple[str, ...] | None, free: tuple[str, ...]
) -> Branch | None:
    for node in ast.walk(tree_of(text) or ast.Module([], [])):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for one in in_this_scope(node.value):
                if isinstance(one, ast.expr) and is_at(one, place):
                    everywhere = ast.copy_location(ast.Constant(None), one)  # there is no condition
                    return branch_of(
                        node, everywhere, (True, False), (text, file), (None if own is None else {*own}, {*free})
                    )
    return None
