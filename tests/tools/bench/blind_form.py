"""The form of the blind pairs: a custom op of each name twice over, once with a right rule and once with a wrong one.

The pairs were written from torch's documentation alone, without a look at how rules are validated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.experimental import register_sharding

SPACE = "blind"
LIBRARY = torch.library.Library(SPACE, "FRAGMENT")
ANY_RANKS = 0
"""`View.ranks` where the form of the rule cannot know the mesh."""

Row = tuple[Sequence[Placement], Sequence[Placement]]
"""Placements of the outputs, and of the tensors of the call in order; None and numbers have none."""
Rule = Callable[..., list[Row]]


@dataclass(frozen=True, slots=True)
class View:
    """What a rule sees of a tensor: `stride` in elements, `ranks` on the mesh axis."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    ranks: int

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    def even(self, dim: int) -> bool:
        """Whether all ranks get as much of a dim; not known without a mesh."""
        return self.ranks != ANY_RANKS and self.shape[dim] % self.ranks == 0


@dataclass(frozen=True, slots=True)
class Pair:
    """`schema` is what follows the name; both rules take every argument of it by position, and get `View` for a tensor.

    `draw` makes a call from a source of random tensors. `via` names the public form or one of torch's two others,
    `outputs` is how many tensors come back where the schema does not say. `wrong_kernel` is there if the rules
    are equal and the ops differ. A name in `names` that ends with `_` makes both ops in place.
    """

    name: str
    schema: str
    kernel: Callable[..., Any]
    draw: Callable[[Any], tuple[Any, ...]]
    right: Rule
    wrong: Rule
    via: str = "public"
    outputs: int | None = None
    expected: str = "finding"

    def named(self, side: str) -> str:
        base, dot, overload = self.name.partition(".")
        tail = "_" if base.endswith("_") else ""
        return f"{base.rstrip('_')}_{side}{tail}{dot}{overload}"

    def overload(self, side: str) -> torch._ops.OpOverload:
        base, _, name = self.named(side).partition(".")
        found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, SPACE), base), name or "default")
        return found

    def register(self) -> None:
        """Both ops, with the kernel and their rules, as an author would."""
        for side, rule in (("right", self.right), ("wrong", self.wrong)):
            kernel = self._with_defaults(side)
            if self._is_for_custom_op():
                _custom_op(self.named(side), self.schema, kernel)
            else:
                LIBRARY.define(self.named(side) + self.schema)
                composite = self.expected == "ignored" and side == "wrong"
                for key in ("CompositeImplicitAutograd",) if composite else ("CPU", "Meta"):
                    LIBRARY.impl(self.named(side), kernel, key)
            FORMS[self.via](self, self.overload(side), rule)

    def _with_defaults(self, side: str) -> Callable[..., Any]:
        """The kernel with every argument: torch leaves out those that equal their defaults."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            op = self.overload(side)
            every = bind(op, args, kwargs)
            named = [a.name for a in op._schema.arguments if a.kwarg_only]
            cut = len(every) - len(named)
            return self.kernel(*every[:cut], **dict(zip(named, every[cut:], strict=True)))

        return kernel

    def _is_for_custom_op(self) -> bool:
        """Whether `torch.library.custom_op` takes the schema, which forbids aliases among results."""
        returns = self.schema.split("->")[1]
        return "!" not in returns and "." not in self.name and self.expected == "finding"

    def rows(
        self, rule: Rule, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], ranks: int
    ) -> list[Row]:
        """The rows of a rule on a call, the replicated one last."""
        bound = [view_of(a, ranks) for a in bind(op, args, kwargs)]
        ins = sum(
            len(b) if isinstance(b, tuple) and all(isinstance(v, View) for v in b) else isinstance(b, View)
            for b in bound
        )
        outs = len(op._schema.returns) if self.outputs is None else self.outputs
        return [*rule(*bound), ([Replicate()] * outs, [Replicate()] * ins)]


def _custom_op(name: str, schema: str, kernel: Callable[..., Any]) -> None:
    """By decorator, mutated arguments named."""
    arguments = schema.split("->")[0].strip(" ()").split(",")
    mutated = tuple(a.split("=")[0].split()[-1] for a in arguments if "!" in a)
    made = torch.library.custom_op(f"{SPACE}::{name}", kernel, mutates_args=mutated, schema=schema)
    made.register_fake(kernel)


def bind(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Every argument of a call in the order of the schema."""
    arguments = op._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [given.get(a.name, a.default_value) for a in arguments]


def view_of(value: Any, ranks: int) -> Any:
    """A tensor of any of the forms in which rules get them, as a `View`."""
    if isinstance(value, (TupleStrategy, list, tuple)) and not hasattr(value, "stride"):
        items = value.children if isinstance(value, TupleStrategy) else value
        return tuple(view_of(v, ranks) for v in items)
    if isinstance(value, OpStrategy):
        value = value.strategies[0].output_spec
    if isinstance(value, DTensorSpec):
        meta = value.tensor_meta
        assert meta is not None
        return View(tuple(meta.shape), tuple(meta.stride), meta.dtype, value.mesh.size())
    if isinstance(value, Tensor):
        return View(tuple(value.shape), value.stride(), value.dtype, ranks)
    if hasattr(value, "stride"):
        return View(tuple(value.shape), tuple(value.stride), value.dtype, ANY_RANKS)
    return value


def _public(pair: Pair, op: torch._ops.OpOverload, rule: Rule) -> None:
    @register_sharding(op)  # type: ignore[untyped-decorator]
    def lines(*args: Any, **kwargs: Any) -> list[Any]:
        return [(list(outs), list(ins)) for outs, ins in pair.rows(rule, op, args, kwargs, ANY_RANKS)]


def _single(pair: Pair, op: torch._ops.OpOverload, rule: Rule) -> None:
    @register_single_dim_strategy(op, schema_info=_info(op))
    def lines(op: Any, args: Any, kwargs: Any) -> list[Any]:
        def placed(p: Placement) -> Any:
            return _ShardingPlaceholder(p.dim) if isinstance(p, Shard) else p

        return [[placed(p) for p in (*outs, *ins)] for outs, ins in pair.rows(rule, op, args, kwargs, ANY_RANKS)[:-1]]


def _strategy(pair: Pair, op: torch._ops.OpOverload, rule: Rule) -> None:
    @register_op_strategy(op, schema_info=_info(op))
    def lines(schema: Any) -> Any:
        rows = pair.rows(rule, op, schema.args_schema, schema.kwargs_schema, ANY_RANKS)
        return expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(), schema, [[*outs, *ins] for outs, ins in rows],
            input_index=len(rows[0][0]), inplace_op=schema.is_inplace_op(),
        )  # fmt: skip


FORMS = {"public": _public, "single": _single, "strategy": _strategy}


def _info(op: torch._ops.OpOverload) -> RuntimeSchemaInfo:
    """Whatever is no tensor is part of the key of a propagation."""
    plain = [a for a in op._schema.arguments if "Tensor" not in str(a.type)]
    first = [i for i, a in enumerate(op._schema.arguments) if a in plain and not a.kwarg_only]
    return RuntimeSchemaInfo(
        first[0] if first else 100, [a.name for a in plain if a.kwarg_only] or None, needs_pytree=True
    )


def along(x: View, *but: int, outs: int = 1, ins: int = 1) -> list[Row]:
    """Everything sharded alike, on each dim of a tensor but some."""
    return [([Shard(d)] * outs, [Shard(d)] * ins) for d in range(x.ndim) if d not in but]


def partial(*kinds: str, outs: int = 1, ins: int = 1) -> list[Row]:
    return [([Partial(kind)] * outs, [Partial(kind)] * ins) for kind in kinds]


def row(outs: str, ins: str = "") -> Row:
    """`row("0 R", "sum 1")`: Shard(0) and Replicate from Partial("sum") and Shard(1)."""

    def placed(word: str) -> Placement:
        return Replicate() if word == "R" else Shard(int(word)) if word.isdigit() else Partial(word)

    return [placed(w) for w in outs.split()], [placed(w) for w in ins.split()]


def into(x: View, out: str, *but: int, ins: int = 1) -> list[Row]:
    """Each dim sharded gives that placement."""
    return [row(out, " ".join([str(d)] * ins)) for d in range(x.ndim) if d not in but]


def at(dim: int, x: View) -> int:
    """A dim counted from the front."""
    return dim % max(x.ndim, 1)


def shard_starts(size: int, ranks: int) -> list[int]:
    """Where the shards of so many elements start."""
    step = math.ceil(size / ranks)
    return [min(i * step, size) for i in range(ranks)]
