"""The discovery of an overload's missing rules, and the calls that they were found on.

A discovery is emitted as a module of plain torch, which registers the missing rules with DTensor when it is imported.

torch's own rules stay: its strategy is called first, whichever of its registries holds it, and the missing rules are
added to the result.  `register_sharding` alone would replace an op strategy or a decomposition, and since torch 2.12 it
is never called for an op that has a single-dim strategy.

| torch part that the emitted module touches                               | read on     | run on |
|--------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher.sharding_propagator                                | 2.11 - 2.15 | 2.13   |
| .op_single_dim_strategy_funcs: a function, or a dataclass with one (2.12) | 2.11 - 2.15 | 2.13   |
| .op_strategy_funcs, .op_to_rules, .decomp_strategy                        | by feature  | 2.13   |
| .op_to_schema_info, .op_to_schema_info_for_single_dim_strategy            | by feature  | 2.13   |
| _op_schema.OpSchema, OpStrategy, RuntimeSchemaInfo                        | 2.11 - 2.15 | 2.13   |
| debug._clear_*_cache                                                      | by feature  | 2.13   |
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localtensor.errors import Refusal
from localtensor.layout import MAX_JUMP_SHARE, shorts
from strategies.inputs import opinfo_samples, typed_values
from strategies.model.arguments import trusts_caller
from strategies.model.call_signature import diverse_subset, python_text
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import run_oracle
from strategies.model.rule import Rule, Sample, overload
from strategies.model.settings import torch_dtype
from strategies.torch_api import dtensor
from strategies.validation.missing_rules import MissingRuleSearch, Survey, search_placements, survey_kinds
from strategies.validation.rule_inference import RuleLine, infer_lines
from strategies.validation.sources.dtensor import claims

CALL = "localtensor discover"
DTYPES = ("float64", "int64", "complex64")
"""Dtypes of the samples: a rule should hold for real numbers, for integers, and for numbers without an order."""
MOST = 24
"""Samples of an overload that are searched."""


class NoSuchOp(Refusal):
    """A name of no overload of torch."""

    def __init__(self, name: str, near: Sequence[str], call: str = CALL) -> None:
        remedy = f"Did you mean {' or '.join(near)}?" if near else "Name an overload, such as aten.add.Tensor."
        super().__init__(call, "OP", repr(name), "no op and no overload has this name", remedy)


@dataclass(frozen=True, slots=True)
class Discovery:
    """`missing` are the valid rules of `op` that DTensor does not register; `surveys` hold their calls and evidence.

    `source` is the kind of rule that DTensor has for the op, "" for none; `samples` are the calls searched.
    """

    op: str
    source: str
    missing: tuple[Rule, ...]
    surveys: tuple[Survey, ...]
    samples: tuple[str, ...]
    combinations: int
    seed: int


def resolve_overloads(name: str, call: str = CALL) -> list[str]:
    """The overloads of a name such as `aten.add.Tensor`, `add.Tensor`, `aten.add` or `add`.

    Of a packet those with a rule in DTensor, or all if none has one.  Raises `NoSuchOp`, as an error of `call`.
    """
    parts = name.split(".")
    readings = [parts] if len(parts) > 1 else []
    readings += [["aten", *parts]] if len(parts) < 3 else []
    for namespace, packet, *which in readings:
        home = getattr(torch.ops, namespace)
        if not hasattr(home, packet):
            continue
        found = [op for op in _of_tensors(getattr(home, packet)) if which in ([], [op.split(".")[2]])]
        if found:
            return sorted([op for op in found if dtensor.registry_of(overload(op))] or found)
    known = {str(op).split(".")[1] for op in dtensor.registered_overloads()}
    raise NoSuchOp(name, difflib.get_close_matches(parts[-1], sorted(known), n=3, cutoff=0.6), call)


def _of_tensors(packet: torch._ops.OpOverloadPacket) -> list[str]:
    """The overloads that take a tensor, without those for `out=`: their rules are those of the op without it."""
    found = []
    for op in (getattr(packet, which) for which in packet.overloads()):
        tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
        if tensors and not any(a.is_out for a in tensors):
            found.append(str(op))
    return found


def discover(op: str, ranks: Sequence[int] = (2, 3), seed: int = 0, given: Sequence[Sample] | None = None) -> Discovery:
    """The missing rules of one overload.

    `given` are calls of it; by default they are OpInfo's samples, or drawn from the schema.  A sample for which the op
    or its own rule raises is left out.  Raises `NoSuchOp`.
    """
    (target,) = resolve_overloads(op)[:1]
    found, searched, combinations = [], [], 0
    for sample in samples_of(target, seed) if given is None else given:
        by_ranks = _searched(sample, ranks, seed)
        if by_ranks:
            found.append((sample, by_ranks))
            searched.append(f"{', '.join(sample.arguments())} from {sample.origin}")
            combinations += sum(seen.combinations for seen in by_ranks.values())
    surveys = survey_kinds(found, seed)
    rules = {str(rule): rule for one in surveys for rule in one.missing()}
    source = dtensor.registry_of(overload(target))
    return Discovery(target, source, tuple(rules.values()), tuple(surveys), tuple(searched), combinations, seed)


def _searched(sample: Sample, ranks: Sequence[int], seed: int) -> dict[int, MissingRuleSearch]:
    """The result of the search on each mesh size; empty where the op or its rule raises, or nothing was tried."""
    try:
        oracle = run_oracle(sample, seed=seed)
        if oracle.unstable > MAX_JUMP_SHARE:
            return {}
        alone = dtensor.PropagatorQuery(sample, 1, oracle.raw)
        seen = {n: search_placements(sample, oracle, n, claims(sample, n, oracle.raw, alone), seed) for n in ranks}
    except (*REJECTIONS, AttributeError):
        return {}
    return seen if any(one.combinations for one in seen.values()) else {}


def samples_of(op: str, seed: int) -> list[Sample]:
    """Calls of one overload from the OpInfos of its name, else drawn from its schema.

    None are drawn for an op that does not check its arguments: inconsistent sizes would end the process.
    """
    packet = op.split(".")[1]
    met: list[Sample] = []
    for info in (
        info for info in opinfo_samples.database() if {packet, packet.strip("_")} & opinfo_samples.plain_names(info)
    ):
        for name in DTYPES:
            if torch_dtype(name) in info.supported_dtypes("cpu"):
                for which in opinfo_samples.SIZES:
                    met += opinfo_samples.capture_calls(
                        info, torch_dtype(name), which, device="cpu", seed=seed, wanted=lambda func: str(func) == op
                    )[0]
    if not met and not trusts_caller(op):
        met = typed_values.schema_calls(overload(op), [torch_dtype(name) for name in DTYPES], seed)
    return diverse_subset(met, MOST)


class NotEmitted(Refusal, call=CALL, argument="--emit"):
    """An op whose missing rules no module can register."""


def module_text(discovery: Discovery) -> str:
    """The text of the module.

    Raises `NotEmitted` where no rule is missing, for an op whose own rule in torch cannot be extended, and for an op
    that returns a list of tensors.
    """
    op = overload(discovery.op)
    if not discovery.missing:
        raise NotEmitted(discovery.op, "no rule is missing", "Leave out --emit.")
    if discovery.source == "rule":
        raise NotEmitted(discovery.op, "torch answers by a rule that cannot be added to", "Leave out --emit.")
    if any("[]" in str(r.type) or "List" in str(r.type) for r in op._schema.returns):
        raise NotEmitted(discovery.op, "it returns a list of tensors", "Leave out --emit.")
    body = "\n".join(_function(op, infer_lines(discovery.surveys)))
    return f"{_head(discovery)}\n\n\n{body}\n\n\n{_TAIL.strip()}\n"


def _head(discovery: Discovery) -> str:
    count = len(discovery.missing)
    sizes = sorted({n for one in discovery.surveys for n in one.ranks})
    docstring = (
        f"{count} sharding {'rule' if count == 1 else 'rules'} of {discovery.op} that torch {torch.__version__} lacks."
        f"\n\nFound by `{CALL} {discovery.op}`, seed {discovery.seed}, in {len(discovery.samples)} calls of the op on"
        f" {' and '.join(map(str, sizes))} ranks.\nImporting this module adds them to what DTensor knows; each is for one"
        f" axis of the mesh.\n\n"
        + "\n".join(f"    {shorts(r.inputs)} -> {shorts(r.outputs)}" for r in discovery.missing)
    )
    return f'"""{docstring}\n"""\n\n{_IMPORTS}\n\nOP = torch.ops.{discovery.op}'


_LOCALS = ("d", "ndims", "numbers", "found", "tensors")
"""Local names of the emitted function."""


def _function(op: torch._ops.OpOverload, made: list[RuleLine]) -> list[str]:
    names = [a.name for a in op._schema.arguments]
    tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
    text = [f"def rules({_signature(op)}):"]
    text += ['    """Placements of the results and of the tensor arguments, as `register_sharding` takes them."""']
    text += [f"    tensors = tensors_in([{', '.join(tensors)}])", "    ndims = [len(t.shape) for t in tensors]"]
    if any("numbers" in where for line in made for where in line.where):
        text.append("    numbers = letters(tensors)")
    replicas = ", ".join(["Replicate()"] * len(op._schema.returns))
    text.append(f"    found = [([{replicas}], [Replicate()] * len(tensors))]")
    for count in sorted({len(line.inputs) for line in made}):
        text.append(f"    if len(tensors) == {count}:")
        for line in made:
            if len(line.inputs) == count:
                text += textwrap.indent(_statement(line), " " * 8).splitlines()
    text.append("    return found")
    # A local would overwrite an argument of its name; the tensor arguments are not read after `tensors_in`.
    lost = [name for name in names if name in _LOCALS and not (name == "tensors" and name in tensors)]
    if lost:
        raise NotEmitted(str(op), f"an argument is called {lost[0]}", "Leave out --emit.")
    return text


def _statement(line: RuleLine) -> str:
    of_dim = [where for where in line.where if where.startswith("d ")]
    of_call = [where for where in line.where if where not in of_dim]
    nested = [f"if {' and '.join(of_call)}:"] if of_call else []
    nested += [f"for d in range(ndims[{line.over}]):"] if line.over is not None else []
    nested += [f"if {' and '.join(of_dim)}:"] if of_dim else []
    nested.append(f"found.append(([{', '.join(line.outputs)}], [{', '.join(line.inputs)}]))")
    return "\n".join("    " * depth + text for depth, text in enumerate(nested))


def _signature(op: torch._ops.OpOverload) -> str:
    parts: list[str] = []
    for argument in op._schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        value = argument.default_value
        default = f"={python_text(tuple(value) if isinstance(value, list) else value)}"
        parts.append(argument.name + (default if argument.has_default_value() else ""))
    return ", ".join(parts)


_IMPORTS = """
from dataclasses import is_dataclass, replace

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
""".strip()

_TAIL = '''
def tensors_in(value):
    """Shape and dtype of each tensor among the arguments, in order."""
    if isinstance(value, TensorMeta):
        return [value]
    if hasattr(value, "tensor_meta"):
        return [value.tensor_meta]
    return [meta for item in value for meta in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def letters(tensors):
    """f for what may be a fraction, b for booleans, i for the rest: one for each tensor."""
    kinds = [t.dtype for t in tensors]
    return "".join("b" if k == torch.bool else "f" if k.is_floating_point or k.is_complex else "i" for k in kinds)


def schema_info(known):
    """The key of DTensor's cache: every argument that is no tensor."""
    own = [(i, a) for i, a in enumerate(OP._schema.arguments) if "Tensor" not in str(a.type)]
    first = min([i for i, a in own if not a.kwarg_only], default=100)
    words = {a.name for _, a in own if a.kwarg_only} | set((known and known.static_kwargkey) or ())
    lists = any("List" in str(a.type) for a in OP._schema.arguments if "Tensor" in str(a.type))
    first = min(first, known.static_argnum) if known else first
    return RuntimeSchemaInfo(first, sorted(words) or None, needs_pytree=lists or bool(known and known.needs_pytree))


def install():
    """Adds the rules to the registry that DTensor asks first for this op."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    single = getattr(propagator, "op_single_dim_strategy_funcs", {})
    if OP in single:
        infos = propagator.op_to_schema_info_for_single_dim_strategy
        single[OP] = added_to_lines(single[OP])
    else:
        infos = propagator.op_to_schema_info
        theirs = propagator.op_strategy_funcs.get(OP) or decomposed(propagator)
        register_sharding(OP)(rules)
        if theirs:
            propagator.op_strategy_funcs[OP] = added_to_strategy(theirs, propagator.op_strategy_funcs[OP])
    infos[OP] = schema_info(infos.get(OP))
    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()


def added_to_lines(known):
    """A single-dim strategy of its own lines, and ours after them."""
    function = known.func if is_dataclass(known) else known

    def both(op, args, kwargs):
        return [*function(op, args, kwargs), *(results + given for results, given in rules(*args, **kwargs)[1:])]

    return replace(known, func=both) if is_dataclass(known) else both


def added_to_strategy(theirs, ours):
    """An op strategy of its own choices, and ours after them."""

    def both(schema):
        known, more = theirs(schema), ours(schema)
        if known is None:
            return more
        return OpStrategy([*known.strategies, *more.strategies]) if isinstance(known, OpStrategy) else known

    return both


def decomposed(propagator):
    """The decomposition that DTensor would otherwise use, if it has one for this op."""
    strategy = getattr(propagator, "decomp_strategy", None)
    if strategy is None or not strategy.has_decomp(OP):
        return None

    def plain(value):
        if isinstance(value, OpStrategy):
            return value.strategies[0].output_spec
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value

    def theirs(schema):
        words = {name: plain(value) for name, value in schema.kwargs_schema.items()}
        try:
            return strategy.propagate_strategy(OpSchema(OP, plain(tuple(schema.args_schema)), words, schema.schema_info))
        except (RuntimeError, NotImplementedError, KeyError, IndexError):
            return None

    return theirs


install()
'''
