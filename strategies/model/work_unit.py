"""What a sweep is made of: units, each an overload, a class of dtypes, a mesh and a kind of trial.

A plan is the product of these, known before anything is tried, so that what is missing can be named.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from strategies.model.rule import Sample

CLASSES = ("real", "complex", "integer", "bool")
"""Classes of dtypes: that of a sample is the first of complex, real, integer and bool among its tensors."""
ALONE, PAIRS, MESHES = "alone", "pairs", "meshes"
"""Kinds of trial: the op alone on one axis; with what follows it; on several axes."""


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """`aten.add.Tensor real 2,2 meshes`, as text and as a value."""

    op: str
    trial: str
    dtypes: str
    mesh: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.trial} {self.dtypes} {mesh_text(self.mesh)}"


def mesh_text(mesh: Sequence[int]) -> str:
    """`2,3`."""
    return ",".join(map(str, mesh))


def mesh_kind(mesh: Sequence[int]) -> str:
    """What matters of a mesh to those who accept that a rule is wrong on it: the number of its axes.

    >>> mesh_kind((4,)), mesh_kind((2, 3))
    ('1 axis', '2 axes')
    """
    return f"{len(mesh)} {'axis' if len(mesh) == 1 else 'axes'}"


def read_unit(text: str) -> Unit:
    """The unit of that text.

    >>> read_unit("aten.add.Tensor meshes real 2,3").mesh
    (2, 3)
    """
    op, trial, dtypes, mesh = text.split(" ")
    return Unit(op, trial, dtypes, tuple(map(int, mesh.split(","))))


def class_of(sample: Sample) -> str:
    """The class of dtypes that a sample is counted to; "real" for a call without tensors."""
    tensors: Sequence[Tensor] = sample.tensors
    if any(t.dtype.is_complex for t in tensors):
        return "complex"
    if not tensors or any(t.dtype.is_floating_point for t in tensors):
        return "real"
    return "bool" if all("bool" in str(t.dtype) for t in tensors) else "integer"


def planned(ops: Iterable[str], trials: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Unit, ...]:
    """Every unit of these overloads, in order; `trials` are pairs of a kind and a mesh."""
    every = itertools.product(sorted(set(ops)), trials, CLASSES)
    return tuple(sorted(Unit(op, kind, dtypes, mesh) for op, (kind, mesh), dtypes in every))


def share(op: str, count: int) -> int:
    """Which of `count` shards tries this overload: the same on every machine.

    All units of an overload go together, so that a wrong rule is confirmed by one shard and not by each.
    """
    return int.from_bytes(hashlib.sha256(op.encode()).digest()[:8], "big") % count


def digest(texts: Iterable[object]) -> str:
    """A short name for a list of texts, the same in any process."""
    return hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest()[:16]
