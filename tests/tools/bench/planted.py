"""Some 600 custom ops, each with one claim of its own that is right or was made wrong: a trial of the judges.

    localtensor validate --rules tests.tools.bench.planted

must find every mutant Unsound and every original Sound.  The names and their order are the same in every
process.  Registering is done twice over: odd numbers by torch's public `register_sharding`, even ones by
the single-dim form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.experimental import register_sharding

from tests.tools.bench import by_hand
from tests.tools.bench.claims import Base, Row
from tests.tools.bench.families import BASES
from tests.tools.bench.mutations import chosen
from tests.tools.bench.ops_varied import VARIED
from tests.tools.bench.varied import Mistake, Varied, key

MISFIT_EVERY = 4
"""Of the mutants whose pieces do not fit each other (torch refuses them aloud) one in so many is planted."""

_bases: dict[str, Base] = {}
_rows: dict[str, Row] = {}
_varied: dict[str, tuple[Varied, Mistake | None]] = {}


def samples(op: torch._ops.OpOverload) -> Iterable[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls on which an op of this module is to be judged."""
    if str(op) in _varied:
        yield from (call for base in _varied[str(op)][0].calls for call in base.calls())
        return
    base = _bases[str(op)]
    for args, kwargs in base.calls():
        yield args, kwargs | ({"out": torch.empty_like(base.func(*args))} if base.style == "out" else {})


def name_of(op: str) -> str:
    """The name of the base or of the varied op."""
    return _varied[op][0].name if op in _varied else _bases[op].name


def rows_of(op: str) -> dict[str, bool]:
    """The rows that are claimed of the op, in words, beside the all-replicate one; and whether they are right."""
    if op not in _varied:
        return {str(claimed(op)): op in ORIGINALS}
    varied, mistake = _varied[op]
    bad = varied.wrong(mistake) if mistake else {}
    return {str(row): str(row) not in bad for _, rows in varied.claimed(mistake) for row in rows}


def row_of(op: str) -> Row:
    """The one row that is claimed of the op beside the all-replicate one."""
    return _rows[op]


def claimed(op: str) -> Row:
    """The row as DTensor has it: with the `out` among the arguments, and without results that nobody is given."""
    base, row = _bases[op], _rows[op]
    outputs = () if base.style == "void" else row.outputs
    return Row((*row.inputs, *(outputs if base.style == "out" else ())), outputs)


def _plant(name: str, base: Base, row: Row) -> str:
    """The op exists and has its rule; its full name."""
    qualified = f"planted::{name}{'_' if base.style in ('inplace', 'void') else ''}"
    named = qualified + ".out" * (base.style == "out")
    torch.library.define(named, base.schema(), tags=(torch.Tag.nondeterministic_seeded,) * base.random)
    run = _kernel(base)
    torch.library.impl(named, ("cpu", "cuda"), run)
    torch.library.register_fake(named, run)
    packet = getattr(torch.ops.planted, qualified.split("::")[1])
    op: torch._ops.OpOverload = packet.out if base.style == "out" else packet.default
    _bases[str(op)], _rows[str(op)] = base, row
    way = _register_publicly if len(_rows) % 2 and base.style != "void" else _register_single_dim
    way = _register_listed if base.many else way
    way(op, base, claimed(str(op)))
    return str(op)


def _plant_varied(name: str, varied: Varied, mistake: Mistake | None) -> str:
    """An op whose rule looks at its scalars; its full name."""
    first = varied.calls[0]
    torch.library.define(f"planted::{name}", first.schema())
    run = _kernel(first)
    torch.library.impl(f"planted::{name}", ("cpu", "cuda"), run)
    torch.library.register_fake(f"planted::{name}", run)
    op: torch._ops.OpOverload = getattr(torch.ops.planted, name).default
    _varied[str(op)] = varied, mistake
    lines = {key(base.args, base.kwargs): [_line(row) for row in rows] for base, rows in varied.claimed(mistake)}
    info = RuntimeSchemaInfo(first.spots, static_kwargkey=[*first.kwargs] or None, needs_pytree=True)

    @register_single_dim_strategy(op, schema_info=info)
    def rule(op: Any, args: Any, kwargs: Any) -> list[Any]:
        return lines.get(key(args[first.spots :], kwargs), [])

    return str(op)


def _line(row: Row) -> list[Any]:
    return [_ShardingPlaceholder(p.dim) if isinstance(p, Shard) else p for p in (*row.outputs, *row.inputs)]


def _kernel(base: Base) -> Callable[..., Any]:
    """The function, with fresh results: a custom op may not give its arguments back unless it writes to them."""

    def run(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        made = base.func(*args, **kwargs)
        if base.style:
            places = [out] if base.style == "out" else base.flat(args)
            for place, result in zip(places, [made] if isinstance(made, Tensor) else made, strict=False):
                place.copy_(result)
            return None if base.style == "void" else places[0]
        fresh = [t.clone() for t in ([made] if isinstance(made, Tensor) else made)]
        return fresh if base.many else fresh[0] if isinstance(made, Tensor) else tuple(fresh)

    return run


def _register_publicly(op: torch._ops.OpOverload, base: Base, row: Row) -> None:
    rest = [None] * len(base.args)
    whole = ([Replicate()] * len(row.outputs), [Replicate()] * len(row.inputs) + rest)

    @register_sharding(op)  # type: ignore[untyped-decorator]
    def lines(*args: Any, **kwargs: Any) -> list[Any]:
        return [whole, ([*row.outputs], [*row.inputs, *rest])]


def _register_single_dim(op: torch._ops.OpOverload, base: Base, row: Row) -> None:
    line = _line(row)
    info = RuntimeSchemaInfo(base.spots, static_kwargkey=[*base.kwargs] or None, needs_pytree=True)

    @register_single_dim_strategy(op, schema_info=info)
    def lines(op: Any, args: Any, kwargs: Any) -> list[Any]:
        return [line]


def _register_listed(op: torch._ops.OpOverload, base: Base, row: Row) -> None:
    """An op that returns a list has a placement for each of its elements, which only this form can say."""
    whole = [Replicate()] * (len(row.outputs) + len(row.inputs))
    info = RuntimeSchemaInfo(base.spots, static_kwargkey=[*base.kwargs] or None, needs_pytree=True)

    @register_op_strategy(op, schema_info=info)
    def lines(schema: Any) -> Any:
        mesh, both = schema.get_mesh_from_args(), [whole, [*row.outputs, *row.inputs]]
        return expand_to_full_mesh_op_strategy(mesh, schema, both, input_index=len(row.outputs))


def _originals() -> list[str]:
    numbered = enumerate((base, row) for base in BASES for row in base.rows())
    planted = [_plant(f"o{number:03d}_{base.name}", base, row) for number, (base, row) in numbered]
    return planted + [_plant_varied(f"o_{varied.name}", varied, None) for varied in VARIED]


def _mutants() -> tuple[dict[str, str], dict[str, str]]:
    made = [mutant for turn, base in enumerate(BASES) for mutant in chosen(base, turn)]
    misfits = [mutant for mutant in made if len(mutant.row.inputs) > 1 and by_hand.refused(mutant.base, mutant.row)]
    fits = [mutant for mutant in made if mutant not in misfits]
    planted = {_plant(f"m{number:03d}_{m.base.name}", m.base, m.row): str(m) for number, m in enumerate(fits)}
    loud = misfits[::MISFIT_EVERY]
    for varied in VARIED:
        for number, mistake in enumerate(varied.mistakes):
            planted[_plant_varied(f"m{number}_{varied.name}", varied, mistake)] = f"{varied.name}: {mistake.words}"
    return planted, {_plant(f"x{number:03d}_{m.base.name}", m.base, m.row): str(m) for number, m in enumerate(loud)}


ORIGINALS: frozenset[str] = frozenset(_originals())
"""The ops whose row is right."""
MUTANTS: dict[str, str]
"""The ops whose row is wrong, and what was done to it in words."""
MISFITS: dict[str, str]
"""Wrong in a way that torch itself refuses aloud: no validator may call these Sound, but they fool nobody."""
MUTANTS, MISFITS = _mutants()
