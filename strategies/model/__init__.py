"""The values: call, sample, rule, program, verdict, settings; their JSON; the oracle."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.model.arguments import DIMS as DIMS
    from strategies.model.arguments import PLAIN as PLAIN
    from strategies.model.arguments import SORTED as SORTED
    from strategies.model.arguments import called as called
    from strategies.model.arguments import is_index as is_index
    from strategies.model.arguments import is_places as is_places
    from strategies.model.arguments import names as names
    from strategies.model.arguments import repeats_sizes as repeats_sizes
    from strategies.model.arguments import schema as schema
    from strategies.model.arguments import trusts as trusts
    from strategies.model.arguments import values as values
    from strategies.model.arguments import with_tensors as with_tensors
    from strategies.model.call_signature import Kind as Kind
    from strategies.model.call_signature import kind_of as kind_of
    from strategies.model.call_signature import scalars as scalars
    from strategies.model.call_signature import source as source
    from strategies.model.layouts import on_axes as on_axes
    from strategies.model.layouts import read_layout as read_layout
    from strategies.model.oracle import REFUSALS as REFUSALS
    from strategies.model.oracle import Truth as Truth
    from strategies.model.oracle import agrees as agrees
    from strategies.model.oracle import metadata_only as metadata_only
    from strategies.model.oracle import mutates as mutates
    from strategies.model.oracle import run as run
    from strategies.model.oracle import same_results as same_results
    from strategies.model.oracle import tell as tell
    from strategies.model.prior_call import arguments_text as arguments_text
    from strategies.model.prior_call import before as before
    from strategies.model.prior_call import others as others
    from strategies.model.program import Program as Program
    from strategies.model.program import held_text as held_text
    from strategies.model.rule import LEAVES as LEAVES
    from strategies.model.rule import SEARCHED as SEARCHED
    from strategies.model.rule import Call as Call
    from strategies.model.rule import Claim as Claim
    from strategies.model.rule import Leaf as Leaf
    from strategies.model.rule import Rule as Rule
    from strategies.model.rule import Sample as Sample
    from strategies.model.rule import call_of as call_of
    from strategies.model.rule import frozen as frozen
    from strategies.model.rule import leaf_at as leaf_at
    from strategies.model.rule import out_leaves as out_leaves
    from strategies.model.rule import overload as overload
    from strategies.model.rule import results as results
    from strategies.model.rule import written as written
    from strategies.model.settings import DEFAULT_DTYPES as DEFAULT_DTYPES
    from strategies.model.settings import BadSetting as BadSetting
    from strategies.model.settings import Settings as Settings
    from strategies.model.settings import UnknownOp as UnknownOp
    from strategies.model.strided_kernels import blind as blind
    from strategies.model.strided_kernels import gapped as gapped
    from strategies.model.verdict import CLEAN as CLEAN
    from strategies.model.verdict import NOTHING as NOTHING
    from strategies.model.verdict import USAGE as USAGE
    from strategies.model.verdict import WRONG as WRONG
    from strategies.model.verdict import Counts as Counts
    from strategies.model.verdict import Crash as Crash
    from strategies.model.verdict import Evidence as Evidence
    from strategies.model.verdict import Finding as Finding
    from strategies.model.verdict import Instance as Instance
    from strategies.model.verdict import Report as Report
    from strategies.model.verdict import Verdict as Verdict
    from strategies.model.work_unit import ALONE as ALONE
    from strategies.model.work_unit import CLASSES as CLASSES
    from strategies.model.work_unit import MESHES as MESHES
    from strategies.model.work_unit import PAIRS as PAIRS
    from strategies.model.work_unit import Unit as Unit
    from strategies.model.work_unit import class_of as class_of
    from strategies.model.work_unit import digest as digest
    from strategies.model.work_unit import mesh_kind as mesh_kind
    from strategies.model.work_unit import planned as planned
    from strategies.model.work_unit import read_unit as read_unit

__all__ = [
    "ALONE",
    "CLASSES",
    "CLEAN",
    "DEFAULT_DTYPES",
    "DIMS",
    "LEAVES",
    "MESHES",
    "NOTHING",
    "PAIRS",
    "PLAIN",
    "REFUSALS",
    "SEARCHED",
    "SORTED",
    "USAGE",
    "WRONG",
    "BadSetting",
    "Call",
    "Claim",
    "Counts",
    "Crash",
    "Evidence",
    "Finding",
    "Instance",
    "Kind",
    "Leaf",
    "Program",
    "Report",
    "Rule",
    "Sample",
    "Settings",
    "Truth",
    "Unit",
    "UnknownOp",
    "Verdict",
    "agrees",
    "arguments_text",
    "before",
    "blind",
    "call_of",
    "called",
    "class_of",
    "digest",
    "frozen",
    "gapped",
    "held_text",
    "is_index",
    "is_places",
    "kind_of",
    "leaf_at",
    "mesh_kind",
    "metadata_only",
    "mutates",
    "names",
    "on_axes",
    "others",
    "out_leaves",
    "overload",
    "planned",
    "read_layout",
    "read_unit",
    "repeats_sizes",
    "results",
    "run",
    "same_results",
    "scalars",
    "schema",
    "source",
    "tell",
    "trusts",
    "values",
    "with_tensors",
    "written",
]

_ROOM = {
    "ALONE": "strategies.model.work_unit",
    "BadSetting": "strategies.model.settings",
    "CLASSES": "strategies.model.work_unit",
    "CLEAN": "strategies.model.verdict",
    "Call": "strategies.model.rule",
    "Claim": "strategies.model.rule",
    "Counts": "strategies.model.verdict",
    "Crash": "strategies.model.verdict",
    "DEFAULT_DTYPES": "strategies.model.settings",
    "DIMS": "strategies.model.arguments",
    "Evidence": "strategies.model.verdict",
    "Finding": "strategies.model.verdict",
    "Instance": "strategies.model.verdict",
    "Kind": "strategies.model.call_signature",
    "LEAVES": "strategies.model.rule",
    "Leaf": "strategies.model.rule",
    "MESHES": "strategies.model.work_unit",
    "NOTHING": "strategies.model.verdict",
    "PAIRS": "strategies.model.work_unit",
    "PLAIN": "strategies.model.arguments",
    "Program": "strategies.model.program",
    "REFUSALS": "strategies.model.oracle",
    "Report": "strategies.model.verdict",
    "Rule": "strategies.model.rule",
    "SEARCHED": "strategies.model.rule",
    "SORTED": "strategies.model.arguments",
    "Sample": "strategies.model.rule",
    "Settings": "strategies.model.settings",
    "Truth": "strategies.model.oracle",
    "USAGE": "strategies.model.verdict",
    "Unit": "strategies.model.work_unit",
    "UnknownOp": "strategies.model.settings",
    "Verdict": "strategies.model.verdict",
    "WRONG": "strategies.model.verdict",
    "agrees": "strategies.model.oracle",
    "arguments_text": "strategies.model.prior_call",
    "before": "strategies.model.prior_call",
    "blind": "strategies.model.strided_kernels",
    "call_of": "strategies.model.rule",
    "called": "strategies.model.arguments",
    "class_of": "strategies.model.work_unit",
    "digest": "strategies.model.work_unit",
    "frozen": "strategies.model.rule",
    "gapped": "strategies.model.strided_kernels",
    "held_text": "strategies.model.program",
    "is_index": "strategies.model.arguments",
    "is_places": "strategies.model.arguments",
    "kind_of": "strategies.model.call_signature",
    "leaf_at": "strategies.model.rule",
    "mesh_kind": "strategies.model.work_unit",
    "metadata_only": "strategies.model.oracle",
    "mutates": "strategies.model.oracle",
    "names": "strategies.model.arguments",
    "on_axes": "strategies.model.layouts",
    "others": "strategies.model.prior_call",
    "out_leaves": "strategies.model.rule",
    "overload": "strategies.model.rule",
    "planned": "strategies.model.work_unit",
    "read_layout": "strategies.model.layouts",
    "read_unit": "strategies.model.work_unit",
    "repeats_sizes": "strategies.model.arguments",
    "results": "strategies.model.rule",
    "run": "strategies.model.oracle",
    "same_results": "strategies.model.oracle",
    "scalars": "strategies.model.call_signature",
    "schema": "strategies.model.arguments",
    "source": "strategies.model.call_signature",
    "tell": "strategies.model.oracle",
    "trusts": "strategies.model.arguments",
    "values": "strategies.model.arguments",
    "with_tensors": "strategies.model.arguments",
    "written": "strategies.model.rule",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
