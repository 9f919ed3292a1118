"""A redistribution as one line of text: `f32[4096,4096] @ dp=8,tp=16: S(0),P(sum) -> R,S(1)`.

| part                  | syntax                                                                                   |
|-----------------------|------------------------------------------------------------------------------------------|
| dtype and shape       | `f32[4096,4096]`, `bool[]`                                                               |
| mesh                  | `dp=8,tp=16`, or only sizes, `8,16`: the axes are then called a, b ...                   |
| placements            | one for each axis in order, `S(0),P(sum)`, or by name in any order, `tp:P(sum), dp:S(0)` |
| order in a shared dim | positions, for all axes that shard it: `S(0)[1],S(0)[0]` is sharded by the second axis first |

The `str` of a `Spec` is accepted on the right; and also on the left, if the mesh is passed as a value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from difflib import get_close_matches

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import Refusal
from localtensor.layout import PARTIAL_KINDS, Mesh, Spec, is_unambiguous, parse, shape_text, shard_cut, short
from strategies.planner.steps.alpha_beta import partials_commute
from strategies.planner.steps.plan import placements_text
from strategies.planner.text import suggestions
from strategies.planner.text.suggestions import TextSpan, UnreadableText

LONGEST = 2_000
"""In characters."""
MOST_AXES, MOST_RANKS, MOST_DIMS, MOST_BLOCKS = 8, 1 << 20, 64, 4_096
"""Axes and ranks of a mesh, dims of a tensor, blocks of a strided shard."""
MOST_BYTES = (1 << 63) - 1
"""The largest tensor whose bytes torch can count."""
EXAMPLE = "f32[8,4] @ dp=2,tp=2: S(0),P(sum) -> R,S(1)"
_NAMES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {shape_text((), dtype)[:-2]: dtype for dtype in [getattr(torch, n) for n in _NAMES]}
"""By the name that a spec prints; never written to."""
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POSITION = re.compile(r"(.*?) *\[ *([0-9]+) *\]")
_COUNT = re.compile(r"[0-9]+")


class BadPlanText(Refusal, call="plan"):
    """A text that is no redistribution. The message names the invalid part and, if one was found, a valid text."""


def read(text: str, mesh: Mesh | None = None) -> tuple[Spec, Spec]:
    """The two specs that a text describes. Raises `BadPlanText`, and nothing else, for any text.

    If `mesh` is given, the text may leave the mesh out, or has to name the same.

    >>> read("f32[8,4] @ dp=2,tp=2: S(0),P(sum) -> R,S(1)")
    (f32[8,4] @ dp:S(0), tp:P(sum), f32[8,4] @ dp:R, tp:S(1))
    >>> read("f32[8] @ dp=2: Shard(0) -> R")
    Traceback (most recent call last):
    strategies.planner.text.parser.BadPlanText: plan: from: 'Shard(0)': this is no placement. Write 'f32[8] @ dp=2: S(0) -> R'.
    """
    try:
        return _read(text, mesh)
    except UnreadableText as bad:
        right = suggestions.suggest_text(text, bad, lambda other: _read(other, mesh))
        remedy = f"Write {right!r}." if right else bad.remedy
        raise BadPlanText(bad.argument, bad.piece.shown, bad.problem, remedy) from None


def text_of(src: Spec, dst: Spec) -> str:
    """The text that parses to these two specs, which are of one tensor on one mesh.

    >>> text_of(*read("f32[8,4] @ dp=2,tp=2: tp:P(sum), dp:S(0) -> R,S(1)"))
    'f32[8,4] @ dp=2,tp=2: S(0),P(sum) -> R,S(1)'
    """
    mesh = ",".join(f"{name}={size}" for name, size in zip(src.mesh.names, src.mesh.sizes, strict=True))
    return f"{shape_text(src.shape, src.dtype)} @ {mesh}: {placements_text(src)} -> {placements_text(dst)}"


def _unreadable(argument: str, piece: TextSpan, problem: str, *meant: str) -> UnreadableText:
    """The error whose remedy is to write as in the example."""
    return UnreadableText(argument, piece, problem, f"Write as in {EXAMPLE!r}.", *meant)


def _read(text: str, mesh: Mesh | None) -> tuple[Spec, Spec]:
    whole = TextSpan.of(text)
    if len(text) > LONGEST:
        raise _unreadable("text", whole, f"it has {len(text):,} characters, and {LONGEST:,} are the most")
    for at, sign in enumerate(text):
        if not " " <= sign <= "~":
            meant = suggestions.ASCII_FORMS.get(sign, "")
            raise _unreadable("text", TextSpan(text, at, at + 1), "this character has no meaning", meant)
    left, right = whole.cut("->")
    if right is None:
        raise _unreadable("text", whole, "there is no -> in it", *suggestions.arrow_for(text))
    if "->" in right.text:
        raise _unreadable("to", right, "there is a second -> in it", right.cut("->")[0].text)
    head, rest = left.cut("@")
    if rest is None:
        meant = suggestions.at_after(left.text)
        raise _unreadable("text", left, "there is no @ between the tensor and its mesh", meant)
    dtype, shape = _tensor(head)
    mesh, was = _mesh(rest, mesh)
    again, now = right.cut("@")
    if now is None:
        now = again
    elif _tensor(again) != (dtype, shape):
        raise _unreadable("to", again, f"the tensor on the left is {head.text}", head.text)
    else:
        now = _mesh(now, mesh)[1]
    return _spec("from", was, mesh, shape, dtype), _spec("to", now, mesh, shape, dtype)


def _tensor(piece: TextSpan) -> tuple[torch.dtype, tuple[int, ...]]:
    name, rest = piece.cut("[")
    if rest is None or not rest.text.endswith("]"):
        raise _unreadable("shape", piece, "this is no dtype and shape", *suggestions.shapes_near(piece.text))
    if name.text not in DTYPES:
        remedy = f"The dtypes are {', '.join(DTYPES)}."
        near = suggestions.dtypes_near(name.text, DTYPES)
        raise UnreadableText("dtype", name, "there is no such dtype", remedy, *near)
    dtype = DTYPES[name.text]
    sizes = TextSpan(piece.whole, rest.start, rest.end - 1).trimmed()
    if sizes.text.endswith(","):
        raise _unreadable("shape", sizes, "a size is missing after the last comma", sizes.text.rstrip(", "))
    shape = tuple(_count("shape", size, "a size", 0) for size in sizes.split())
    if len(shape) > MOST_DIMS:
        raise _unreadable("shape", sizes, f"{len(shape)} dims are more than torch has, which is {MOST_DIMS}")
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > MOST_BYTES:
        raise UnreadableText("shape", sizes, "torch counts bytes in 63 bits, and these are more", "Make a dim smaller.")
    return dtype, shape


def _count(argument: str, piece: TextSpan, what: str, least: int) -> int:
    if not _COUNT.fullmatch(piece.text):
        problem = f"{what} is a whole number of {least} or more"
        raise _unreadable(argument, piece, problem, *suggestions.counts_near(piece.text))
    count = int(piece.text)
    if count < least:
        raise _unreadable(argument, piece, f"{what} is {least} or more", str(least))
    return count


def _mesh(piece: TextSpan, given: Mesh | None) -> tuple[Mesh, TextSpan]:
    """The mesh, and the placements that follow it."""
    head, rest = piece.cut(":")
    parts = head.split()
    named = [part.cut("=") for part in parts]
    if not any(size for _, size in named) and not (parts and all(_COUNT.fullmatch(part.text) for part in parts)):
        if given is not None:  # the print of a spec: its axes have no sizes
            return given, piece
        problem = "the axes of the mesh have no sizes"
        raise UnreadableText("mesh", piece, problem, "Write them before the placements, as in 'dp=2,tp=4: S(0),R'.")
    if rest is None:
        meant = re.sub(r"(=? *[0-9]+) +(?=[RSP])", r"\1: ", piece.text, count=1)
        raise _unreadable("mesh", piece, "there is no : between the mesh and the placements", meant)
    if len(parts) > MOST_AXES:
        raise UnreadableText("mesh", head, f"{len(parts)} axes are more than {MOST_AXES}", "Plan for fewer axes.")
    if not any(size for _, size in named):
        mesh = Mesh.of(*(_count("mesh", part, "the size of an axis", 1) for part in parts))
    else:
        mesh = _named_mesh(named)
    if mesh.ranks > MOST_RANKS:
        problem = f"{mesh.ranks:,} ranks are more than {MOST_RANKS:,}"
        raise UnreadableText("mesh", head, problem, "Make an axis smaller.")
    if given is not None and mesh != given:
        raise UnreadableText("mesh", head, f"the mesh is {given}", "Leave the mesh out, or name the same.")
    return mesh, rest


def _named_mesh(named: list[tuple[TextSpan, TextSpan | None]]) -> Mesh:
    sizes: dict[str, int] = {}
    for name, size in named:
        if not _AXIS.fullmatch(name.text):
            raise _unreadable("mesh", name, "an axis is called by letters, digits and _, a letter first")
        if size is None:
            raise UnreadableText("mesh", name, "this axis has no size", f"Write {name.text}=2, if it has two ranks.")
        if name.text in sizes:
            remedy = "Give each axis a name of its own."
            raise UnreadableText("mesh", name, "two axes have this name", remedy, name.text + "2")
        sizes[name.text] = _count("mesh", size, "the size of an axis", 1)
    return Mesh(tuple(sizes.values()), tuple(sizes))


def _spec(side: str, piece: TextSpan, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    pieces = _by_axis(side, piece, mesh)
    turned = [_split_position(side, one) for one in pieces]
    placements = [_placement(side, one, shape, dtype) for one, _ in turned]
    for (one, a), (other, b) in itertools.combinations(zip(pieces, placements, strict=True), 2):
        if not partials_commute(a, b, dtype):
            problem = f"{short(a)} and {short(b)} do not commute: which is reduced first would matter"
            raise UnreadableText(side, other, problem, "Reduce one of them first.", one.text, "R")
    return Spec(mesh, tuple(placements), shape, dtype, _shard_order(side, pieces, turned, placements))


def _by_axis(side: str, piece: TextSpan, mesh: Mesh) -> list[TextSpan]:
    """The placement of each axis in the order of the mesh, whether or not they are given by name."""
    parts, count = piece.split(), len(mesh.names)
    named = [part.cut(":") for part in parts]
    if len(parts) != count:
        problem = f"{len(parts)} placement{'s' * (len(parts) != 1)} for {count} mesh {'axis' if count == 1 else 'axes'}"
        texts = [part.text for part in parts]
        meant = texts[:count] if len(parts) > count else [*texts, *["R"] * (count - len(parts))]
        raise UnreadableText(side, piece, problem, f"Give {', '.join(mesh.names)} a placement each.", ",".join(meant))
    if not any(placement for _, placement in named):
        return parts
    found: dict[str, TextSpan] = {}
    free = [name for name in mesh.names if name not in {name.text for name, _ in named}]
    for part, (name, placement) in zip(parts, named, strict=True):
        if placement is None:
            problem, meant = "this one does not name its axis, and others do", [f"{one}:{part.text}" for one in free]
            raise UnreadableText(side, part, problem, "Name the axis of each, or of none.", *meant)
        if name.text not in mesh.names:
            problem = f"there is no such axis, but {', '.join(mesh.names)}"
            raise _unreadable(side, name, problem, *get_close_matches(name.text, mesh.names, 1), *free)
        if name.text in found:
            raise UnreadableText(side, name, "this axis has two placements", "Give each axis one.", *free)
        found[name.text] = placement
    return [found[name] for name in mesh.names]


def _split_position(side: str, piece: TextSpan) -> tuple[TextSpan, int | None]:
    """The placement without its position, and the position."""
    found = _POSITION.fullmatch(piece.text)
    if not found:
        return piece, None
    return TextSpan(piece.whole, piece.start, piece.start + len(found[1])), int(found[2])


def _placement(side: str, piece: TextSpan, shape: tuple[int, ...], dtype: torch.dtype) -> Placement:
    dims = len(shape)
    meant = suggestions.placements_near(piece.text, dims)
    if not re.fullmatch(r"R|S\([0-9]{1,18}\)|SS\([0-9]{1,18}, ?[0-9]{1,18}\)|P\([A-Za-z_]+\)", piece.text):
        remedy = "Write R, S(0), SS(0,2), P(sum), P(avg), P(min), P(max) or P(product)."
        problem = "a placement is missing here" if not piece.text else "this is no placement"
        if re.fullmatch(r"S\(-[0-9]+\)", piece.text):
            problem = "a dim is counted from the left, from 0"
        raise UnreadableText(side, piece, problem, remedy, *meant)
    if piece.text.startswith("P(") and piece.text[2:-1] not in PARTIAL_KINDS:
        remedy = f"The reductions are {', '.join(PARTIAL_KINDS)}."
        raise UnreadableText(side, piece, "there is no such reduction", remedy, *meant)
    placement = parse(piece.text)
    cut = shard_cut(placement)
    if cut is not None and cut[0] >= dims:
        have = f"dims 0 to {dims - 1}" if dims > 1 else "dim 0 only" if dims else "no dims"
        last = f"S({dims - 1})" if dims else "R"
        raise UnreadableText(side, piece, f"the tensor has {have}", "Name one of those dims.", last)
    if cut is not None and not 1 <= cut[1] <= MOST_BLOCKS:
        problem = f"a strided shard cuts its dim into 1 to {MOST_BLOCKS:,} blocks"
        raise UnreadableText(side, piece, problem, "Write S(0) for one block.", f"S({cut[0]})")
    if isinstance(placement, Partial) and not is_unambiguous(placement.reduce_op, dtype):
        means = [f"P({kind})" for kind in PARTIAL_KINDS if is_unambiguous(kind, dtype)]
        remedy = f"Write {', '.join(means)}." if means else "Write R."
        raise UnreadableText(side, piece, f"it means nothing for {shape_text((), dtype)[:-2]}", remedy, *means[:1], "R")
    return placement


def _shard_order(
    side: str, pieces: list[TextSpan], turned: list[tuple[TextSpan, int | None]], placements: list[Placement]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The shard order that the positions describe."""
    by_dim: dict[int, list[int]] = defaultdict(list)
    for axis, placement in enumerate(placements):
        cut = shard_cut(placement)
        if cut is not None:
            by_dim[cut[0]].append(axis)
        elif turned[axis][1] is not None:
            problem = "only a shard has a turn in cutting a dim"
            raise UnreadableText(side, pieces[axis], problem, "Leave the turn out.", turned[axis][0].text)
    found = []
    for dim, axes in by_dim.items():
        turns = [turned[axis][1] for axis in axes]
        if set(turns) == {None}:
            continue
        for axis, turn in zip(axes, turns, strict=True):
            if turn is None or turn >= len(axes) or turns.count(turn) > 1:
                fault = "has none" if turn is None else "has one too high" if turn >= len(axes) else "shares one"
                known = f"{len(axes)} axes cut dim {dim}, and their turns are [0] to [{len(axes) - 1}]"
                if len(axes) == 1:
                    known = f"one axis cuts dim {dim}, and its turn is [0]"
                shard = turned[axis][0].text
                free = [f"{shard}[{one}]" for one in range(len(turns)) if one not in turns]
                raise _unreadable(side, pieces[axis], f"{known}, and this one {fault}", *free, shard)
        found.append((dim, tuple(axes[turns.index(turn)] for turn in range(len(axes)))))
    return tuple(found)
