"""`spmd_types` as a source: what its checker types the results of each function of its op table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Shard

from strategies.model.rule import Claim
from strategies.validation.probe import Case
from strategies.validation.sources import functions
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.protocol import Answer, FunctionSource, NamedLayout, RefusedLayouts
from strategies.validation.sources.script import Sides, Wording
from strategies.validation.sources.spmd_types import collectives, collectives_two_axes, op_table, two_axes, typed
from strategies.validation.sources.spmd_types.collectives import Collective
from strategies.validation.sources.spmd_types.collectives_two_axes import OnOneOfTwo
from strategies.validation.sources.spmd_types.hooks import HookSource, hooks_of_module

_ASK = """def check(rank):
    axes = [spmd.MeshAxis.of(size, math.prod(SIZES[i + 1 :])) for i, size in enumerate(SIZES)]
    types, grads = {types}, {grads}
    x = [pieces[rank].clone().requires_grad_(i in grads).clone() for i, pieces in enumerate(HELD[: len(types)])]
    with spmd.set_current_mesh(dict(zip(("tp", "dp"), axes))):
        for piece, row in zip(x, types):
            cuts = [tuple(a for a, one in zip(axes, row) if one == S(dim)) for dim in range(piece.ndim)]
            spec = spmd.PartitionSpec(*(cut if len(cut) > 1 else cut[0] if cut else None for cut in cuts))
            local = {{a: V if isinstance(one, S) else one for a, one in zip(axes, row)}}
            spmd.assert_type(piece, local, spec if any(cuts) else None)
        with spmd.checker.typecheck(local=not any(isinstance(one, S) for row in types for one in row)):
            out = on_a_rank(x)
    found = []
    for one in out:
        row = [repr(spmd.get_local_type(one)[a]) for a in axes]
        for dim, entry in enumerate(spmd.get_partition_spec(one) or ()):
            own = entry if isinstance(entry, tuple) else (entry,)
            row = [f"S({{dim}})" if a in own else old for a, old in zip(axes, row)]
        found.append(", ".join(row))
    if rank == 0:
        print(f"spmd_types types the results as {{found}}", flush=True)
    wanted = {wanted}
    if any(b is not None and a != b for a, b in zip(found, wanted)):
        raise SystemExit(f"spmd_types types the results as {{found}}, not as {{wanted}}: another version?")

"""
_IMPORTS = "import math\nimport spmd_types as spmd\nimport spmd_types.checker\nfrom spmd_types import I, P, R, S, V  # noqa: F401\n"
ANY_DIM = -1
"""The result of a call without sizes may be sharded along any dim, or none."""
SIZED = ("reshape", "view", "expand")
"""Functions whose sizes the checker takes as those of the pieces (`_SIZE_ARG_OPS`)."""


class SpmdTypes(FunctionSource):
    """The claims of the installed `spmd_types`."""

    name = "spmd_types"
    package, concatenated = "spmd-types", True

    def __init__(self) -> None:
        typed.package()

    def of_module(self, module: ModuleType) -> HookSource:
        """The hooks of a user's module, in place of the op table.  Raises `BadRules`."""
        return hooks_of_module(module)

    def functions(self) -> Mapping[str, Callable[..., Any]]:
        plain = op_table.functions()
        pairs = {label + two_axes.SUFFIX: two_axes.OnTwoAxes(label, function) for label, function in plain.items()}
        return {**plain, **pairs, **collectives.functions(), **collectives_two_axes.functions()}

    def calls(self, names: Sequence[str], seed: int) -> Iterable[FunctionCall]:
        plain = [name.removesuffix(two_axes.SUFFIX) for name in names]
        for label, group in itertools.groupby(op_table.calls(plain, seed), key=lambda call: call.label):
            every = list(group)
            alone, both = (
                {one, op_table.base_name(label)}.intersection(names) for one in (label, label + two_axes.SUFFIX)
            )
            if alone or not names:
                yield from every
            if both or not names:
                yield from two_axes.calls(label, every[0].function, every)
        yield from collectives.calls(names)
        yield from collectives_two_axes.calls(names)

    def names(self, label: str) -> Sequence[str]:
        found = collectives.functions().get(label) or collectives_two_axes.functions().get(label)
        return (op_table.base_name(label.removesuffix(two_axes.SUFFIX)),) if found is None else (found.name,)

    def without(self, label: str) -> str:
        if label in collectives_two_axes.functions():
            return "it makes no type of this one on an axis alone"
        if label.endswith(two_axes.SUFFIX):
            return "no call of it has floats and sizes that two axes can share"
        return "it takes no tensor: the same value on each rank, whatever its type"

    def layouts(self, x: Tensor, ranks: int) -> Sequence[NamedLayout]:
        return typed.layouts(x, ranks)

    def tuples(self, call: FunctionCall, ranks: int) -> list[tuple[NamedLayout, ...]]:
        one = call.function
        if isinstance(one, Collective):
            return [(one.src,)] if one.ranks == ranks else []
        if isinstance(one, OnOneOfTwo):
            return [(collectives_two_axes.layouts(call)[0],)] if ranks == two_axes.SIZES[0] else []
        if two_axes.is_one(call):
            return two_axes.first(call)[0] if ranks == two_axes.SIZES[0] else []
        return super().tuples(call, ranks)

    def drawn(self, call: FunctionCall, ranks: int) -> tuple[int, int] | None:
        if not two_axes.is_one(call) or ranks != two_axes.SIZES[0]:
            return None
        tried, every = two_axes.first(call)
        return (len(tried), every) if len(tried) < every else None

    def mesh(self, case: Case) -> tuple[int, ...]:
        pair = _on_two_axes(functions.function_call(case.sample, self.labels))
        return two_axes.SIZES if pair else super().mesh(case)

    def on_every_axis(self, call: FunctionCall, claim: Claim, case: Case) -> Sides:
        return two_axes.sides(claim, case) if _on_two_axes(call) else super().on_every_axis(call, claim, case)

    def outputs(self, call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int) -> Answer:
        if isinstance(call.function, Collective):
            return collectives.answer(call, call.function)
        if isinstance(call.function, OnOneOfTwo):
            return collectives_two_axes.answer(call)
        if two_axes.is_one(call):
            return two_axes.answer(call, inputs)
        last: RefusedLayouts | None = None
        for scaled, text in _local_texts(call, inputs, ranks):
            try:
                found = self._asked(call, inputs, ranks, text)
            except RefusedLayouts as error:
                last = last or error
                continue
            made = found[0].meaning if found else None
            if scaled != ANY_DIM and (made.dim if isinstance(made, Shard) else None) != scaled:
                continue  # with these sizes it is a piece of another call
            return Answer(tuple(None if one is typed.V else one for one in found), text)
        raise last or RefusedLayouts("the sizes are not those of a piece")

    def code(self, call: FunctionCall, text: str) -> str:
        if isinstance(call.function, Collective):
            return call.function.code()
        if isinstance(call.function, OnOneOfTwo):
            return call.function.code(call.kwargs["dst"])
        if two_axes.is_one(call):
            return self.code(two_axes.plain(call), re.sub(r",? ?second_axis='[^']*'", "", text))
        if call.label in op_table.getters():
            return f"{text}.{call.label.rpartition('.')[2]}"
        return f"{call.label}({text})"

    def wording(
        self, call: FunctionCall, inputs: Sequence[NamedLayout], outputs: Sequence[NamedLayout | None]
    ) -> Wording:
        if isinstance(call.function, Collective):
            return Wording(f"spmd_types {typed.version()}: {call.label}", _IMPORTS)
        if isinstance(call.function, OnOneOfTwo):
            words = f"{call.label}, to {call.kwargs['dst']}, with {call.kwargs['other']} on the other"
            return Wording(f"spmd_types {typed.version()}: {words}", _IMPORTS + collectives_two_axes.IMPORTS)
        rows: list[tuple[NamedLayout, ...]] = [(one,) for one in inputs]
        made = [None if one is None else one.name for one in outputs]
        if two_axes.is_one(call):
            rows = list(zip(inputs, two_axes.second(call), strict=True))
            made = [f"{one}, {two}" for one, two in two_axes.result_rows(call, inputs)]
        types = ", ".join(f"[{', '.join(map(str, row))}]" for row in rows)
        ask = _ASK.format(types=f"[{types}]", grads=list(call.wrt), wanted=made)
        head = super().wording(call, inputs, outputs).head.replace(self.title, f"spmd_types {typed.version()}", 1)
        gradient = f"; the gradients of {_numbers(call.wrt)} do not have the layouts that follow" if call.wrt else ""
        return Wording(
            head + gradient,
            _IMPORTS,
            ask,
        )

    def _asked(
        self, call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int, texts: Sequence[str] | None
    ) -> tuple[NamedLayout, ...]:
        """The layouts of the results, the same for the first and the last rank's pieces."""
        axis = typed.mesh_axis(ranks)
        grads = [i in call.wrt for i in range(len(inputs))]
        found = []
        for rank in dict.fromkeys((0, ranks - 1) if _uneven(call, inputs, ranks) else (0,)):
            pieces = [typed.piece(x, one, ranks, rank) for x, one in zip(call.tensors, inputs, strict=True)]

            def run(tensors: Sequence[Tensor], rank: int = rank) -> Any:
                if texts is None:
                    return call.on(tensors)()
                args, kwargs = functions.arguments(texts[rank], tensors)
                return call.function(*args, **kwargs)

            rows = typed.result_layouts(run, pieces, [(one,) for one in inputs], (axis,), grads)
            found.append(tuple(one for (one,) in rows))
        if any(one != found[0] for one in found):
            raise RefusedLayouts("ranks with uneven pieces get different types")
        return found[0]


def _on_two_axes(call: FunctionCall) -> bool:
    return two_axes.is_one(call) or isinstance(call.function, OnOneOfTwo)


def _numbers(wrt: Sequence[int]) -> str:
    return ", ".join(f"tensor {i}" for i in wrt)


def _uneven(call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int) -> bool:
    pairs = zip(call.tensors, inputs, strict=True)
    return any(isinstance(p := one.meaning, Shard) and x.shape[p.dim] % ranks for x, one in pairs)


def _local_texts(
    call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int
) -> Iterator[tuple[int | None, tuple[str, ...] | None]]:
    """For each dim of the result that may be the sharded one: the dim, and each rank's arguments with its own size there.

    For calls without sizes `ANY_DIM`, and None: each rank has the arguments of the call.
    """
    if op_table.base_name(call.label) not in SIZED or not any(isinstance(one.meaning, Shard) for one in inputs):
        yield ANY_DIM, None
        return
    leaves = list(call.args[1:])
    nested = len(leaves) == 1 and isinstance(leaves[0], (list, tuple))
    sizes = list(leaves[0]) if nested else leaves
    for at, size in enumerate(sizes):
        if not isinstance(size, int) or (size > 0 and size % ranks):
            continue
        own = [*sizes[:at], size // ranks if size > 0 else size, *sizes[at + 1 :]]
        args = (call.args[0], type(leaves[0])(own)) if nested else (call.args[0], *own)
        yield at, (functions.call_text(args, call.kwargs),) * ranks
    yield None, None
