"""Meshes, placements, shards, partial values, tolerances: arithmetic on shapes, no process group."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.layout.fold_order import IN_A_ROW as IN_A_ROW
    from localtensor.layout.meaning import COMMUTING as COMMUTING
    from localtensor.layout.meaning import Layout as Layout
    from localtensor.layout.meaning import factors_of as factors_of
    from localtensor.layout.meaning import has_meaning as has_meaning
    from localtensor.layout.meaning import in_order as in_order
    from localtensor.layout.meaning import order_of as order_of
    from localtensor.layout.mesh import Mesh as Mesh
    from localtensor.layout.partials import agreed as agreed
    from localtensor.layout.partials import parts as parts
    from localtensor.layout.partials import reducible as reducible
    from localtensor.layout.reductions import CARRIED as CARRIED
    from localtensor.layout.reductions import Op as Op
    from localtensor.layout.reductions import PremulSum as PremulSum
    from localtensor.layout.reductions import carrier as carrier
    from localtensor.layout.reductions import check_reducible as check_reducible
    from localtensor.layout.reductions import divided as divided
    from localtensor.layout.reductions import name_of as name_of
    from localtensor.layout.reductions import premultiplied as premultiplied
    from localtensor.layout.row_intervals import Runs as Runs
    from localtensor.layout.row_intervals import chunk as chunk
    from localtensor.layout.row_intervals import cuts_of as cuts_of
    from localtensor.layout.row_intervals import held_at as held_at
    from localtensor.layout.row_intervals import runs_text as runs_text
    from localtensor.layout.shard_order import check_sizes as check_sizes
    from localtensor.layout.shard_order import first_unlike_rank as first_unlike_rank
    from localtensor.layout.shard_order import lies_alike as lies_alike
    from localtensor.layout.shard_order import ordered as ordered
    from localtensor.layout.shard_order import remedy_of as remedy_of
    from localtensor.layout.shard_order import rows_by_dim as rows_by_dim
    from localtensor.layout.shard_order import strided as strided
    from localtensor.layout.shards import assemble as assemble
    from localtensor.layout.shards import bounds as bounds
    from localtensor.layout.shards import by_rank as by_rank
    from localtensor.layout.shards import in_sequence as in_sequence
    from localtensor.layout.shards import local_shape as local_shape
    from localtensor.layout.shards import local_shapes as local_shapes
    from localtensor.layout.shards import shapes_on as shapes_on
    from localtensor.layout.shards import split as split
    from localtensor.layout.shards import split_axis as split_axis
    from localtensor.layout.shards import spread as spread
    from localtensor.layout.shards import strided_bounds as strided_bounds
    from localtensor.layout.spec import KINDS as KINDS
    from localtensor.layout.spec import ShardOrder as ShardOrder
    from localtensor.layout.spec import Spec as Spec
    from localtensor.layout.spec import StridedShard as StridedShard
    from localtensor.layout.spec import cuts as cuts
    from localtensor.layout.spec import is_defined as is_defined
    from localtensor.layout.spec import is_plain as is_plain
    from localtensor.layout.spec import parse as parse
    from localtensor.layout.spec import shape_text as shape_text
    from localtensor.layout.spec import short as short
    from localtensor.layout.spec import shorts as shorts
    from localtensor.layout.tolerance import GENEROUS as GENEROUS
    from localtensor.layout.tolerance import JUMP as JUMP
    from localtensor.layout.tolerance import UNSTABLE as UNSTABLE
    from localtensor.layout.tolerance import WIDER as WIDER
    from localtensor.layout.tolerance import close as close
    from localtensor.layout.tolerance import rounds as rounds
    from localtensor.layout.tolerance import scale_of as scale_of
    from localtensor.layout.tolerance import slack_of as slack_of
    from localtensor.layout.tolerance import widened as widened

__all__ = [
    "CARRIED",
    "COMMUTING",
    "GENEROUS",
    "IN_A_ROW",
    "JUMP",
    "KINDS",
    "UNSTABLE",
    "WIDER",
    "Layout",
    "Mesh",
    "Op",
    "PremulSum",
    "Runs",
    "ShardOrder",
    "Spec",
    "StridedShard",
    "agreed",
    "assemble",
    "bounds",
    "by_rank",
    "carrier",
    "check_reducible",
    "check_sizes",
    "chunk",
    "close",
    "cuts",
    "cuts_of",
    "divided",
    "factors_of",
    "first_unlike_rank",
    "has_meaning",
    "held_at",
    "in_order",
    "in_sequence",
    "is_defined",
    "is_plain",
    "lies_alike",
    "local_shape",
    "local_shapes",
    "name_of",
    "order_of",
    "ordered",
    "parse",
    "parts",
    "premultiplied",
    "reducible",
    "remedy_of",
    "rounds",
    "rows_by_dim",
    "runs_text",
    "scale_of",
    "shape_text",
    "shapes_on",
    "short",
    "shorts",
    "slack_of",
    "split",
    "split_axis",
    "spread",
    "strided",
    "strided_bounds",
    "widened",
]

_ROOM = {
    "CARRIED": "localtensor.layout.reductions",
    "COMMUTING": "localtensor.layout.meaning",
    "GENEROUS": "localtensor.layout.tolerance",
    "IN_A_ROW": "localtensor.layout.fold_order",
    "JUMP": "localtensor.layout.tolerance",
    "KINDS": "localtensor.layout.spec",
    "Layout": "localtensor.layout.meaning",
    "Mesh": "localtensor.layout.mesh",
    "Op": "localtensor.layout.reductions",
    "PremulSum": "localtensor.layout.reductions",
    "Runs": "localtensor.layout.row_intervals",
    "ShardOrder": "localtensor.layout.spec",
    "Spec": "localtensor.layout.spec",
    "StridedShard": "localtensor.layout.spec",
    "UNSTABLE": "localtensor.layout.tolerance",
    "WIDER": "localtensor.layout.tolerance",
    "agreed": "localtensor.layout.partials",
    "assemble": "localtensor.layout.shards",
    "bounds": "localtensor.layout.shards",
    "by_rank": "localtensor.layout.shards",
    "carrier": "localtensor.layout.reductions",
    "check_reducible": "localtensor.layout.reductions",
    "check_sizes": "localtensor.layout.shard_order",
    "chunk": "localtensor.layout.row_intervals",
    "close": "localtensor.layout.tolerance",
    "cuts": "localtensor.layout.spec",
    "cuts_of": "localtensor.layout.row_intervals",
    "divided": "localtensor.layout.reductions",
    "factors_of": "localtensor.layout.meaning",
    "first_unlike_rank": "localtensor.layout.shard_order",
    "has_meaning": "localtensor.layout.meaning",
    "held_at": "localtensor.layout.row_intervals",
    "in_order": "localtensor.layout.meaning",
    "in_sequence": "localtensor.layout.shards",
    "is_defined": "localtensor.layout.spec",
    "is_plain": "localtensor.layout.spec",
    "lies_alike": "localtensor.layout.shard_order",
    "local_shape": "localtensor.layout.shards",
    "local_shapes": "localtensor.layout.shards",
    "name_of": "localtensor.layout.reductions",
    "order_of": "localtensor.layout.meaning",
    "ordered": "localtensor.layout.shard_order",
    "parse": "localtensor.layout.spec",
    "parts": "localtensor.layout.partials",
    "premultiplied": "localtensor.layout.reductions",
    "reducible": "localtensor.layout.partials",
    "remedy_of": "localtensor.layout.shard_order",
    "rounds": "localtensor.layout.tolerance",
    "rows_by_dim": "localtensor.layout.shard_order",
    "runs_text": "localtensor.layout.row_intervals",
    "scale_of": "localtensor.layout.tolerance",
    "shape_text": "localtensor.layout.spec",
    "shapes_on": "localtensor.layout.shards",
    "short": "localtensor.layout.spec",
    "shorts": "localtensor.layout.spec",
    "slack_of": "localtensor.layout.tolerance",
    "split": "localtensor.layout.shards",
    "split_axis": "localtensor.layout.shards",
    "spread": "localtensor.layout.shards",
    "strided": "localtensor.layout.shard_order",
    "strided_bounds": "localtensor.layout.shards",
    "widened": "localtensor.layout.tolerance",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
