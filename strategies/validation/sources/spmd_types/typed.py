"""The types of `spmd_types` and its checker: the one module that touches them.

| part of spmd_types                                              | read on | run on |
|-----------------------------------------------------------------|---------|--------|
| R, I, V, P, Shard, MeshAxis.of(size, stride), set_current_mesh  | 0.3.1   | 0.3.1  |
| assert_type, get_local_type, get_partition_spec, SpmdTypeError  | 0.3.1   | 0.3.1  |
| checker.typecheck(local=...)                                    | 0.3.1   | 0.3.1  |
| _checker._OP_REGISTRY, _DECOMP_TYPE_RULES, its two sets of factories | 0.3.1 | 0.3.1 |
| rules.run_typecheck; _mesh_axis._reset                          | 0.3.1   | 0.3.1  |

`tests/strategies/validation/sources/test_spmd_typed.py` checks it by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import error_in_one_line
from localtensor.layout import split_axis
from strategies.model.kernels import REJECTIONS
from strategies.model.settings import BadSource
from strategies.validation.sources.functions import tensor_results
from strategies.validation.sources.protocol import NamedLayout, RefusedLayouts, SourceRaises, sharded

PACKAGE, INSTALL = "spmd_types", "pip install 'localtensor[spmd-types]'"
AXIS = "tp"
"""The name of the mesh axis on which tensors are typed."""
_MORE_AXES = ("dp",)
R = NamedLayout("R", Replicate(), Partial())
I = NamedLayout("I", Replicate(), Replicate())  # noqa: E741
P = NamedLayout("P", Partial(), Replicate())
V = NamedLayout("V", Replicate(), None)
"""Each rank its own value, without a statement on a whole: its meaning is never used."""
_NAMES = ("R", "I", "V", "P", "S", "Shard", "MeshAxis", "set_current_mesh", "assert_type", "get_local_type",
          "get_partition_spec", "PartitionSpec", "SpmdTypeError", "rules")  # fmt: skip
_FAKE_LOG = "torch._subclasses.fake_tensor"
_RESIZED = "An output with one or more elements was resized"
"""torch's warning where it writes to an `out=` of another size."""


@functools.cache
def package() -> ModuleType:
    """The package, with its checker.  Raises `BadSource` where it is not installed, or lacks a part that is used here."""
    try:
        found = importlib.import_module(PACKAGE)
        checker = importlib.import_module(f"{PACKAGE}.checker")
    except ModuleNotFoundError as error:
        if error.name == PACKAGE:
            raise BadSource(PACKAGE, "its package is not installed", f"Run {INSTALL}.") from None
        raise BadSource(PACKAGE, f"importing it raises {error_in_one_line(error)}", "Install what it needs.") from error
    lacking = [name for name in _NAMES if not hasattr(found, name)] + ["typecheck"] * (
        not hasattr(checker, "typecheck")
    )
    if lacking:
        problem = f"version {version()} of its package has no {lacking[0]}"
        raise BadSource(PACKAGE, problem, f"Install the version that this one reads: {INSTALL}.")
    return found


def version() -> str:
    """The installed version of the package."""
    return metadata.version(PACKAGE)


def registry() -> ModuleType:
    """The module that has the op table."""
    package()
    return importlib.import_module(f"{PACKAGE}._checker")


def layouts(x: Tensor, ranks: int) -> list[NamedLayout]:
    """R, I, P and every S(i) of a whole tensor, R first."""
    parts = [P] if x.dtype != torch.bool else []
    return [R, I, *parts, *(sharded(d) for d, size in enumerate(x.shape) if size >= ranks)]


def type_of(layout: NamedLayout) -> Any:
    """The type of the package for a layout."""
    found = package()
    if isinstance(layout.meaning, Shard):
        return found.S(layout.meaning.dim)
    return getattr(found, layout.name)


def layout_of(x: Any, axis: Any) -> NamedLayout:
    """The layout that a typed tensor has on an axis.  Raises `RefusedLayouts` for one without a type, `BadSource` for a type
    that this version does not know."""
    found = package()
    typ = found.get_local_type(x).get(axis)
    if typ is None:
        raise RefusedLayouts("the result has no type on the axis")
    spec = found.get_partition_spec(x)
    if typ is found.V and spec is not None:
        for dim, entry in enumerate(spec):
            if entry is not None and axis in (entry if isinstance(entry, tuple) else (entry,)):
                return sharded(dim)
    for layout in (R, I, V, P):
        if typ is getattr(found, layout.name):
            return layout
    problem = f"version {version()} of its package types a result as {typ!r}, which this one does not know"
    raise BadSource(PACKAGE, problem, f"Install the version that it reads: {INSTALL}.")


def piece(x: Tensor, layout: NamedLayout, ranks: int, rank: int) -> Tensor:
    """A rank's piece of a whole tensor, for its shape; parts of a sum have the values of the whole."""
    return split_axis(x, layout.meaning, ranks)[rank] if isinstance(layout.meaning, Shard) else x


@contextlib.contextmanager
def quiet_checker() -> Iterator[None]:
    """A context in which torch neither warns nor logs what DTensor raises inside of the checker."""
    log = logging.getLogger(_FAKE_LOG)
    before, log.disabled = log.disabled, True  # another level would clear the caches of all loggers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def forget_groups() -> None:
    """Drop what the package keeps of process groups: those of a run are gone after it."""
    importlib.import_module(f"{PACKAGE}._mesh_axis")._reset()


def mesh_axis(ranks: int) -> Any:
    """An axis of so many ranks, without a process group."""
    return package().MeshAxis.of(ranks, 1)


def typed(x: Tensor, layout: NamedLayout, axis: Any, *, grad: bool) -> Tensor:
    """A copy of a piece with the type of its layout.  With `grad` it requires a gradient and may be written to."""
    own = x.detach().clone()
    own = own.requires_grad_().clone() if grad else own
    package().assert_type(own, {axis: type_of(layout)})
    return own


def typed_on(x: Tensor, layouts: Sequence[NamedLayout], axes: Sequence[Any], *, grad: bool) -> Tensor:
    """The same with a layout on each of some axes; a dim that several shard is cut by the first of them first."""
    if len(axes) == 1:
        return typed(x, layouts[0], axes[0], grad=grad)
    found = package()
    own = x.detach().clone()
    own = own.requires_grad_().clone() if grad else own
    cuts = [[a for a, one in zip(axes, layouts, strict=True) if one.meaning == Shard(dim)] for dim in range(x.ndim)]
    types = {
        a: found.V if isinstance(one.meaning, Shard) else type_of(one) for a, one in zip(axes, layouts, strict=True)
    }
    spec = found.PartitionSpec(*(tuple(cut) if len(cut) > 1 else cut[0] if cut else None for cut in cuts))
    found.assert_type(own, types, spec if any(cuts) else None)
    return own


def layouts_on(x: Any, axes: Sequence[Any]) -> tuple[NamedLayout, ...]:
    """The layouts of a typed tensor on some axes.  Raises as `layout_of`, and `RefusedLayouts` where a dim is cut by a later axis
    first."""
    made = tuple(layout_of(x, axis) for axis in axes)
    for entry in package().get_partition_spec(x) or ():
        if isinstance(entry, tuple) and list(entry) != [axis for axis in axes if axis in entry]:
            raise RefusedLayouts("a dim of the result is cut by the second axis first")
    return made


def result_layouts(
    function: Callable[..., Any],
    pieces: Sequence[Tensor],
    inputs: Sequence[Sequence[NamedLayout]],
    axes: Sequence[Any],
    grads: Sequence[bool] = (),
) -> tuple[tuple[NamedLayout, ...], ...]:
    """The layouts, one for each axis, of the tensor results of a function that takes a list of typed pieces.

    `inputs[i]` are the layouts of piece i, and `grads[i]` is whether it requires a gradient; by default none does.

    Raises `RefusedLayouts` where the checker, or the function itself, refuses them, and `SourceRaises` where the checker
    raises anything else.
    """
    spmd = package()
    is_global = any(isinstance(one.meaning, Shard) for row in inputs for one in row)
    grads = grads or [False] * len(pieces)
    names = (AXIS, *_MORE_AXES)[: len(axes)]
    with quiet_checker(), spmd.set_current_mesh(dict(zip(names, axes, strict=True))):
        warnings.filterwarnings("error", message=_RESIZED, category=UserWarning)
        given = [typed_on(x, row, axes, grad=g) for x, row, g in zip(pieces, inputs, grads, strict=True)]
        try:
            with importlib.import_module(f"{PACKAGE}.checker").typecheck(local=not is_global):
                out = tensor_results(function(given))
        except spmd.SpmdTypeError as error:
            raise RefusedLayouts(error_in_one_line(error)) from None
        except (*REJECTIONS, UserWarning) as error:
            _check_takes(function, pieces, grads)
            raise SourceRaises(f"{type(error).__name__}: {error_in_one_line(error, 160)}") from None
        return tuple(layouts_on(x, axes) for x in out)


def _check_takes(function: Callable[..., Any], pieces: Sequence[Tensor], grads: Sequence[bool]) -> None:
    """Raise `RefusedLayouts` where the function itself does not take the pieces."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            function([x.detach().clone().requires_grad_(g).clone() for x, g in zip(pieces, grads, strict=True)])
    except (*REJECTIONS, UserWarning) as error:
        raise RefusedLayouts(f"the function refuses the pieces: {error_in_one_line(error)}") from None
