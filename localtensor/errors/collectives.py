"""Refusals of the collectives: the arguments of the ranks do not fit together."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import ClassVar

from localtensor.errors.base import Refusal


def _first_two(facts: Mapping[str, object], noun: str) -> str:
    """The first fact and the first that differs from it: enough for any number of ranks."""
    name, first = next(iter(facts.items()))
    other = next(key for key, fact in facts.items() if fact != first)
    return f"{name} has {noun} {first}, {other} has {noun} {facts[other]}"


def _argument(facts: Mapping[str, object]) -> str:
    return next(iter(facts)).partition("[")[0]


class NotOnePerRank(Refusal):
    """An argument with one entry for each rank is a single tensor, is empty, or has another length."""

    PROBLEM = "a collective needs what each rank of the group brings"
    REMEDY = "Pass a list with an entry for each rank, in group order."


class WrongListLength(Refusal, RuntimeError, argument="lists[{rank}]", values="{got} tensors"):
    """A rank brings too many or too few tensors."""

    PROBLEM = "the call needs {want} of this rank"
    REMEDY = "Let rank {rank} bring a list of {want}."


class RefusedByGloo(Refusal, RuntimeError):
    """Lists of tensors that gloo refuses; the problem is in gloo's words, for programs that look for them."""


class NothingToReduce(Refusal, argument="lists", values="empty lists"):
    """A coalesced reduction to which no rank brings a tensor."""

    PROBLEM = "gloo refuses a coalesced call of no tensors"
    REMEDY = "Leave the call out."


class ListsDiffer(Refusal):
    """A coalesced call to which the ranks bring different numbers of tensors."""

    def __init__(self, call: str, lengths: Mapping[str, int]) -> None:
        remedy = f"Bring the first {min(lengths.values())} on every rank, and the rest in calls of their own."
        problem = "each tensor needs its partner on every rank"
        super().__init__(call, "lists", _first_two(lengths, "length"), problem, remedy)


class ListFromNonRoot(Refusal, argument="lists[{rank}]", values="rank {rank} brings {count} tensors, root={root}"):
    """A rank other than the root brings pieces to a scatter."""

    PROBLEM = "only the root has something to scatter"
    REMEDY = "Let rank {rank} bring an empty list."


class ShapesDiffer(Refusal):
    """Different shapes in a call that needs one; on the wire, rows would be cut short or read as others."""

    def __init__(self, call: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        values, remedy = _first_two(shapes, "shape"), self._remedy(list(shapes.values()))
        super().__init__(call, _argument(shapes), values, "the call needs one shape throughout", remedy)

    @staticmethod
    def _remedy(shapes: list[tuple[int, ...]]) -> str:
        sizes = [prod(shape) for shape in shapes]
        if len(set(sizes)) == 1:
            return f"Reshape each of them to {shapes[0]}."
        if len({len(shape) for shape in shapes}) == 1:
            return f"Pad each of them to {tuple(max(dims) for dims in zip(*shapes, strict=True))}."
        return f"Flatten each of them and pad it to {(max(sizes),)}."


class DtypesDiffer(Refusal):
    """Different dtypes in one call; on the wire, one rank's bits would be read as another's numbers."""

    def __init__(self, call: str, dtypes: Mapping[str, object], common: object) -> None:
        values, remedy = _first_two(dtypes, "dtype"), f"Convert each of them to {common}."
        super().__init__(call, _argument(dtypes), values, "the call needs one dtype throughout", remedy)


class DevicesDiffer(Refusal):
    """Tensors from different devices."""

    def __init__(self, call: str, devices: Mapping[str, object]) -> None:
        values, remedy = _first_two(devices, "device"), f"Move each of them to {next(iter(devices.values()))}."
        super().__init__(call, _argument(devices), values, "all ranks are simulated on one device", remedy)


class NotDense(Refusal, RuntimeError):
    """A sparse tensor."""

    PROBLEM = "only strided tensors have a definition here"
    REMEDY = "Pass x.to_dense()."


class NotContiguous(Refusal, RuntimeError, ValueError, values="shape {shape} with strides {stride}"):
    """A tensor with gaps or another order in memory, in a call where gloo refuses it or moves the wrong bytes."""

    PROBLEM = "Tensors must be contiguous, as the call moves memory as it lies"
    REMEDY = "Pass x.contiguous()."


class DtypeNotCarried(Refusal, RuntimeError):
    """A dtype that gloo's collectives do not take."""

    PROBLEM = "gloo carries no such dtype in a collective"
    REMEDY = "Pass x.to({carrier}) and convert the answer back."


class ComplexNotGathered(Refusal, argument="held"):
    """Complex numbers in gather, the one collective for which torch does not view them as pairs of reals."""

    PROBLEM = "gloo's gather carries no complex numbers"
    REMEDY = "Pass torch.view_as_real(x), or use all_gather."


class UnknownReduction(Refusal, RuntimeError, argument="op", values="{op!r}"):
    """A reduction that is in no table."""

    PROBLEM = "there is no such reduction"
    REMEDY = "Write {known}."


class DtypeNotReducible(Refusal, RuntimeError):
    """A reduction that has no meaning, or no backend, for this kind of number."""

    _REMEDIES: ClassVar[dict[tuple[str, str], str]] = {
        ("avg", "bool"): "Pass x.to(torch.float64).",
        ("avg", "integer"): "Pass x.to(torch.float64), or use 'sum' and divide.",
        ("premul_sum", "bool"): "Multiply by the factor on each rank, then use 'sum'.",
        ("premul_sum", "integer"): "Multiply by the factor on each rank, then use 'sum'.",
        ("product", "complex"): "Use all_gather and multiply on each rank.",
        ("min", "complex"): "Pass x.abs(), or torch.view_as_real(x) for each part by itself.",
        ("max", "complex"): "Pass x.abs(), or torch.view_as_real(x) for each part by itself.",
    }

    def __init__(self, call: str, op: str, dtype: object, kind: str) -> None:
        remedy = self._REMEDIES.get((op, kind)) or "Pass integers, as x.real.to(torch.int64) makes them."
        super().__init__(call, "op", f"{op!r} of {dtype}", f"there is no {op} of {kind} tensors", remedy)


class RankOutside(Refusal, RuntimeError, values="{argument}={rank}"):
    """A root, sender or receiver that is not in the group."""

    PROBLEM = "invalid {argument} rank, the group has {ranks} ranks"
    REMEDY = "Name a rank from 0 to {last}, counted within the group."


class UnevenDim(Refusal):
    """A dim that does not divide into one equal piece for each rank."""

    def __init__(self, call: str, dim: int, shape: Sequence[int], ranks: int, instead: str = "") -> None:
        over = shape[dim] % ranks
        values = f"dim {dim} of shape {tuple(shape)}, {ranks} ranks"
        remedy = f"Pad dim {dim} to {shape[dim] - over + ranks}{instead and ', or ' + instead}."
        super().__init__(call, "held", values, f"{shape[dim]} rows leave {over} over", remedy)


class ScalarTensor(Refusal, argument="held", values="shape ()"):
    """A tensor of no dims, in a call that joins or cuts along one."""

    PROBLEM = "a tensor of no dims has none to join or cut along"


class SplitCount(Refusal):
    """A rank names too many or too few split sizes."""

    PROBLEM = "{count} sizes for {ranks} ranks"
    REMEDY = "Name {ranks} sizes, 0 where nothing is sent, or None for equal pieces."


class NegativeSplit(Refusal):
    """A split size below zero."""

    PROBLEM = "a piece has no fewer than 0 rows"
    REMEDY = "Write 0 where nothing is sent."


class SplitSum(Refusal, values="{splits} of {rows} rows"):
    """Split sizes that do not add up to the rows that the rank has."""

    PROBLEM = "the sizes add up to {total}"
    REMEDY = "Let them add up to {rows}, or pass {total} rows."


class SplitsDisagree(Refusal, argument="output_splits[{rank}]", values="{expected} expected, {sent} sent"):
    """A rank expects other sizes than its peers send."""

    PROBLEM = "rank {rank} waits for rows that no rank sends, or gets rows that it has no space for"
    REMEDY = "Write {sent}."


class NotAPermutation(Refusal, argument="destinations", values="{destinations} for {ranks} ranks"):
    """Destinations that do not reach each rank once."""

    PROBLEM = "each rank must be named once"
    REMEDY = "Order the ranks 0 to {last} in another way, or use send_recv."


class SelfSend(Refusal, argument="pairs", values="({rank}, {rank})"):
    """A rank that sends to itself."""

    PROBLEM = "rank {rank} would wait for itself"
    REMEDY = "Leave the pair ({rank}, {rank}) out: rank {rank} keeps its tensor."


class NegativeTag(Refusal, RuntimeError, argument="tag", values="tag={tag}"):
    """A message with a tag below zero."""

    PROBLEM = "a tag is 0 or more"
    REMEDY = "Count tags from 0."


class TwoSenders(Refusal, argument="pairs", values="[({one}, {receiver}), ({other}, {receiver})]"):
    """Two ranks send to the same rank in one call."""

    PROBLEM = "rank {receiver} holds one tensor afterwards"
    REMEDY = "Make a call for each sender."
