"""Some 600 custom ops, each with one claim of its own that is right or was made wrong: a trial of the judges.

    localtensor validate --rules tests.bench.planted

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
from torch.distributed.tensor.experimental import register_sharding

from tests.bench import by_hand
from tests.bench.claims import Base, Row
from tests.bench.mutations import chosen
from tests.bench.ops import BASES

MISFIT_EVERY = 4
"""Of the mutants whose pieces do not fit each other (torch refuses them aloud) one in so many is planted."""

_bases: dict[str, Base] = {}
_rows: dict[str, Row] = {}


def samples(op: torch._ops.OpOverload) -> Iterable[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls on which an op of this module is to be judged."""
    return _bases[str(op)].calls()


def base_of(op: str) -> Base:
    """What the op computes, and what is right about it."""
    return _bases[op]


def row_of(op: str) -> Row:
    """The one row that is claimed of the op beside the all-replicate one."""
    return _rows[op]


def _plant(name: str, base: Base, row: Row) -> str:
    """The op exists and has its rule; its full name."""
    qualified = f"planted::{name}"
    torch.library.define(qualified, base.schema())
    run = _kernel(base)
    torch.library.impl(qualified, ("cpu", "cuda"), run)
    torch.library.register_fake(qualified, run)
    op: torch._ops.OpOverload = getattr(torch.ops.planted, name).default
    _bases[str(op)], _rows[str(op)] = base, row
    (_register_publicly if len(_rows) % 2 else _register_single_dim)(op, base, row)
    return str(op)


def _kernel(base: Base) -> Callable[..., Any]:
    """The function, with fresh results: a custom op may not give its arguments back."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = base.func(*args, **kwargs)
        return out.clone() if isinstance(out, Tensor) else tuple(t.clone() for t in out)

    return run


def _register_publicly(op: torch._ops.OpOverload, base: Base, row: Row) -> None:
    rest = [None] * len(base.args)
    whole = ([Replicate()] * len(row.outputs), [Replicate()] * len(row.inputs) + rest)

    @register_sharding(op)  # type: ignore[untyped-decorator]
    def lines(*args: Any, **kwargs: Any) -> list[Any]:
        return [whole, ([*row.outputs], [*row.inputs, *rest])]


def _register_single_dim(op: torch._ops.OpOverload, base: Base, row: Row) -> None:
    line = [_ShardingPlaceholder(p.dim) if isinstance(p, Shard) else p for p in (*row.outputs, *row.inputs)]
    scalars = 1 if base.listed else len(base.dims)
    info = RuntimeSchemaInfo(scalars, static_kwargkey=[*base.kwargs] or None, needs_pytree=True)

    @register_single_dim_strategy(op, schema_info=info)
    def lines(op: Any, args: Any, kwargs: Any) -> list[Any]:
        return [line]


def _originals() -> list[str]:
    numbered = enumerate((base, row) for base in BASES for row in base.rows())
    return [_plant(f"o{number:03d}_{base.name}", base, row) for number, (base, row) in numbered]


def _mutants() -> tuple[dict[str, str], dict[str, str]]:
    made = [mutant for turn, base in enumerate(BASES) for mutant in chosen(base, turn)]
    misfits = [mutant for mutant in made if len(mutant.row.inputs) > 1 and by_hand.refused(mutant.base, mutant.row)]
    fits = [mutant for mutant in made if mutant not in misfits]
    planted = {_plant(f"m{number:03d}_{m.base.name}", m.base, m.row): str(m) for number, m in enumerate(fits)}
    loud = misfits[::MISFIT_EVERY]
    return planted, {_plant(f"x{number:03d}_{m.base.name}", m.base, m.row): str(m) for number, m in enumerate(loud)}


ORIGINALS: frozenset[str] = frozenset(_originals())
"""The ops whose row is right."""
MUTANTS: dict[str, str]
"""The ops whose row is wrong, and what was done to it in words."""
MISFITS: dict[str, str]
"""Wrong in a way that torch itself refuses aloud: no validator may call these Sound, but they fool nobody."""
MUTANTS, MISFITS = _mutants()
