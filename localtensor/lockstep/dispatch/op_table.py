"""The op table: how each overload runs on many values at once, and what it does to its arguments.

    stack     on stacks: ops that torch tags as pointwise, and ops with a rule in lockstep/dispatch/batching.py
    vmap      under vmap, by torch's batching rule
    ranks     row by row: the shape of its result depends on data, or there is no batching rule
    draws     row by row with the random stream of each rank, see lockstep/values/rng_streams.py
    parts     decomposed: composite ops, which reach the mode only in inference mode

An op on a value that all ranks share always runs once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from localtensor._util.call_sites import Args, Kwargs
from localtensor.errors import NotInLockstep
from localtensor.lockstep.dispatch import batching_dims as batching_dims  # noqa: PLC0414  # registers its rules
from localtensor.lockstep.dispatch.batching import BATCHING_RULES, BatchingRule
from localtensor.lockstep.dispatch.decompositions import LIST_OP_PREFIXES, rewrite_function
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import by_value, one_cell_per_row, refinement
from localtensor.lockstep.values.rank_int import Int, is_rank_int, on_rank
from localtensor.lockstep.values.storage import Memory, memory_of, refine


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


# Overloads whose result depends on the shapes and dtypes of their tensors only: it is the same on all ranks of one shape.
VALUE_FREE_OPS = _aten(
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_empty_strided",
)  # fmt: skip
# Random ops whose result depends on the streams and on shapes only.
RANDOM_LIKE_OPS = _aten("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
# Random ops that overwrite their first argument without reading it.
RANDOM_FILLS = _aten(
    "normal_", "uniform_", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "random_", "random_.from", "random_.to",
)  # fmt: skip
# Ops that reshape their first argument in place and lack torch.Tag.inplace_view.
UNTAGGED_RESHAPES = _aten("squeeze_", "squeeze_.dim", "squeeze_.dims", "resize_")


class Execution(Enum):
    """How an op runs where ranks differ; see the module docstring."""

    STACK = "stack"
    VMAP = "vmap"
    RANKS = "ranks"
    DRAWS = "draws"
    PARTS = "parts"


# Ops that write to arguments without an alias annotation in their schema.
UNDECLARED_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)

# Overloads whose batching rule differs from the op row by row, and how.  Found by
# tests/localtensor/lockstep/dispatch/test_every_overload.py on torch 2.13.0; _cdist_backward also on 2.14.1.
WRONG_BATCHING_RULES: dict[str, str] = {
    "aten::index_fill.int_Tensor": "a scalar that differs is filled into a tensor of no dims that is shared",
    "aten::linalg_pinv.atol_rtol_tensor": "the rows of an empty matrix are lost",
    "aten::embedding": "an index that is out of range reads the table of another row",
    "aten::_cdist_backward": "what is shared is read as if each row had its own",
    "aten::roll": "values of no dims are rolled from row to row",
}

# torch gives these a batching rule, a decomposition in Python, when a process calls torch.vmap for the first time
# (torch/_functorch: lazy_load_decompositions; tried on torch 2.13.0, the same eight read in 2.14.1).  A program's
# result must not depend on that.
LATE_BATCHING_RULES = _aten(
    "addr", "huber_loss_backward", "mse_loss_backward", "nll_loss_backward", "nll_loss_forward",
    "nll_loss2d_backward", "nll_loss2d_forward", "smooth_l1_loss_backward",
)  # fmt: skip

_BATCHED = ("FuncTorchBatched", "FuncTorchBatchedDecomposition")


@dataclass(frozen=True, slots=True, eq=False)
class OpTraits:
    """The properties of one overload.

    `rule` is its batching rule (lockstep/dispatch/batching.py), `vmap` whether torch has one, `rewrite` the function
    that rewrites its calls (lockstep/dispatch/decompositions.py).  `lists`: it takes lists of tensors, and runs an op
    for each place in them.

    `writes` are the positions and names of the arguments that it writes to; `returns` has for each result the position
    of the argument that is returned, or None for a new tensor.  `if_training` is the argument that decides whether it
    writes at all.  `views`: results share memory with the first tensor argument.  `reshapes`: it changes the shape of
    its first argument in place.  `value_free`: only shapes and dtypes of its tensors matter.
    """

    way: Execution
    rule: BatchingRule | None
    vmap: bool
    rewrite: Callable[..., Any] | None
    if_training: tuple[int, str] | None
    lists: bool
    writes: tuple[tuple[int, str], ...]
    returns: tuple[int | None, ...]
    views: bool
    reshapes: bool
    value_free: bool


_properties: dict[OpOverload, OpTraits] = {}


def op_traits(op: OpOverload) -> OpTraits:
    """The properties of an overload, cached."""
    found = _properties.get(op)
    if found is None:
        found = _properties[op] = _read_schema(op)
    return found


def _read_schema(op: OpOverload) -> OpTraits:
    schema = op._schema
    writes: list[tuple[int, str]] = []
    aliases: dict[str, int] = {}
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            aliases.update(dict.fromkeys(argument.alias_info.before_set, index))
            if argument.alias_info.is_write:
                writes.append((index, argument.name))
    returns: list[int | None] = []
    views = op.name() == "aten::_unsafe_view"
    for result in schema.returns:
        info = result.alias_info
        place = next((aliases[name] for name in info.before_set if name in aliases), None) if info else None
        written = info is not None and info.is_write
        returns.append(place if written else None)
        views = views or (info is not None and not written)
    way = execution_of(op)
    for index, argument in enumerate(schema.arguments):
        if argument.name in UNDECLARED_WRITES.get(op.overloadpacket.__name__, ()):
            writes.append((index, argument.name))
    if_training = None  # `training` of batch norm, which decides whether the running statistics are written
    if writes and all(name.startswith("running_") for _, name in writes):
        training = ((i, a.name) for i, a in enumerate(schema.arguments) if a.name in ("training", "train"))
        if_training = next(training, None)
    return OpTraits(
        way=way,
        rule=BATCHING_RULES.get(op.name()),
        vmap=way is not Execution.RANKS and has_batching_rule(op),
        rewrite=rewrite_function(op),
        if_training=if_training,
        lists=op.overloadpacket.__name__.startswith(LIST_OP_PREFIXES),
        writes=tuple(writes),
        returns=tuple(returns),
        views=views,
        reshapes=torch.Tag.inplace_view in op.tags or op.name() in UNTAGGED_RESHAPES,
        value_free=op.name() in VALUE_FREE_OPS,
    )


def execution_of(op: OpOverload) -> Execution:
    """How an overload runs where ranks differ.

    >>> execution_of(torch.ops.aten.mul.Tensor), execution_of(torch.ops.aten.nonzero.default)
    (<Execution.STACK: 'stack'>, <Execution.RANKS: 'ranks'>)
    """
    name, tags = op.name(), op.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return Execution.DRAWS
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU"):
        return Execution.PARTS
    if torch.Tag.data_dependent_output in tags:
        return Execution.RANKS
    if torch.Tag.pointwise in tags or name in BATCHING_RULES:
        return Execution.STACK
    if torch.Tag.dynamic_output_shape in tags and not name.startswith("aten::index."):
        return Execution.RANKS
    return Execution.VMAP if has_batching_rule(op) else Execution.RANKS


def has_batching_rule(op: OpOverload) -> bool:
    """Whether torch has a batching rule that is correct, and present in every process."""
    name = op.name()
    if name in WRONG_BATCHING_RULES or name in LATE_BATCHING_RULES or torch.Tag.data_dependent_output in op.tags:
        return False
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _BATCHED)


def list_ops() -> Iterator[tuple[str, Execution]]:
    """Every aten overload that can be called from Python, by name, with how it runs."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        op = overload(name) if name.startswith("aten::") else None
        if op is not None:
            yield name, execution_of(op)


def overload(name: str) -> OpOverload | None:
    """The overload of that name, as `aten::add.Tensor`; None if Python cannot call it.

    >>> overload("aten::add.Tensor")
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    packet, _, variant = name.removeprefix("aten::").partition(".")
    try:
        found: OpOverload = getattr(getattr(torch.ops.aten, packet), variant or "default")
    except (AttributeError, RuntimeError):  # an overload of TorchScript only, or one without an implementation
        return None
    return found


aten = torch.ops.aten

# Ops that reshape a tensor in place, and the view op whose result the tensor becomes.
VIEW_OPS = {
    "aten::t_": aten.t.default,
    "aten::transpose_": aten.transpose.int,
    "aten::unsqueeze_": aten.unsqueeze.default,
    "aten::squeeze_": aten.squeeze.default,
    "aten::squeeze_.dim": aten.squeeze.dim,
    "aten::squeeze_.dims": aten.squeeze.dims,
    "aten::as_strided_": aten.as_strided.default,
}


def reshape_in_place(mode: Mode, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run an op that reshapes its first argument, a LocalTensor, in place, or moves it to other memory; returns it."""
    x, name = args[0], func.name()
    if name in VIEW_OPS:
        adopt(x, mode.run(VIEW_OPS[name], args, kwargs))
    elif name == "aten::set_.source_Tensor":
        share_memory_with(x, args[1])
    elif name in ("aten::resize_", "aten::resize_as_"):
        like = args[1].size() if name == "aten::resize_as_" else args[1]
        _resize(x, like, **kwargs)
    elif name.startswith("aten::set_"):
        _move_to_storage(x, func, args[1:], kwargs)
    elif name != "aten::detach_":  # autograd has done it
        raise NotInLockstep(name, "it gives a tensor another shape in place, in a way that is not known here")
    return x


def adopt(x: LocalTensor, other: LocalTensor) -> None:
    """Give a tensor the sizes, cells and partition of another."""
    torch.Tensor.data.__set__(x, other)  # type: ignore[attr-defined]
    x._cells, x._partition = other._cells, other._partition


def share_memory_with(x: LocalTensor, other: Tensor) -> None:
    """Make a tensor share memory with another, and no longer with its former views."""
    if isinstance(other, LocalTensor):
        alias = x._mode.run(aten.alias.default, (other,), {})  # with cells of its own
        memory = alias._memory
    else:
        alias, memory = wrap((other.detach(),), x._mode.everyone, x._mode), Memory(outside=True)
    adopt(x, alias)
    memory.join(x)


_memory_by_storage: dict[int, weakref.ref[Memory]] = {}  # by the address of a storage


def _move_to_storage(x: LocalTensor, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Move a tensor to a storage that the program holds, as it does while it loads a file."""
    storage = args[0] if args else torch.UntypedStorage(device=x.device)
    try:
        storage.data_ptr()
    except RuntimeError:  # no bytes are behind it
        raise NotInLockstep(str(func), "the storage is that of a LocalTensor: each rank has its own") from None
    with torch._C._DisableTorchDispatch():
        cell = func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    adopt(x, wrap((cell,), x._mode.everyone, x._mode))
    found = _memory_by_storage.get(storage._cdata)
    memory = found and found()
    if not memory or any(y._cells[0].untyped_storage()._cdata != storage._cdata for y in memory.members()):
        memory = Memory()
        for key in [key for key, one in _memory_by_storage.items() if one() is None]:
            del _memory_by_storage[key]
        _memory_by_storage[storage._cdata] = weakref.ref(memory)
    memory.join(x)


def resize_out(func: OpOverload, x: LocalTensor, results: Sequence[Any]) -> None:
    """Update the sizes of a tensor given as out= to those of its cells; `results` are the op's, by cell.

    Raises `NotInLockstep` if the rows of a stack need another shape: a stack has no space for it.
    """
    # Cells that were not written come last.
    for cell, rows, done in zip(x._cells, x._partition.sizes, results, strict=False):
        shapes = {done.shape[rows > 1 :]} if isinstance(done, Tensor) else {row.shape for row in done}
        if rows > 1 and shapes != {cell.shape[1:]}:
            why = "its out= holds values that differ by rank, and has another shape than is written: pass one of that shape"
            raise NotInLockstep(str(func), why)
    shape = x.shape
    if all(type(size) is int for size in shape):
        pairs = zip(x._cells, x._partition.sizes, strict=True)
        if {tuple(cell.shape[rows > 1 :]) for cell, rows in pairs} != {tuple(shape)}:
            adopt(x, wrap(x._cells, x._partition, x._mode))


def _resize(x: LocalTensor, size: Sequence[Int], **options: Any) -> None:
    final = one_cell_per_row(x._partition)
    for one in size:
        if is_rank_int(one):
            final = refinement(final, by_value(one.node.values, one.node.held))
    refine(x, final)
    memory_of(x)
    cells = []
    for cell, old in enumerate(x._cells):
        rank = final.ranks(cell)[0]
        with torch._C._DisableTorchDispatch():
            cells.append(old.detach().resize_([on_rank(one, rank) for one in size], **options))
    adopt(x, wrap(tuple(cells), final, x._mode))
