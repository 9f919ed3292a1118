"""Mismatched calls of the ranks of a group: one class for each property in which they can differ.

On a real cluster these hang, or give silently wrong numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

from localtensor._util.events import Call, Place
from localtensor.errors import base


class CollectiveMismatch(base.ProgramFault):
    """The calls at one position of a group's sequence differ.

    `calls` has one for each rank that has arrived, in the order of the message: where most ranks agree, the others
    come first.  `FACT` formats the property of a `call` that is compared; without it, the whole call is.
    """

    FACT: ClassVar[str] = ""
    ARGUMENT: ClassVar[str] = "call"
    PROBLEM: ClassVar[str] = "the ranks of a group must make the same call"
    REMEDY: ClassVar[str] = "Make the same call on every rank of the group."

    def __init__(self, calls: Sequence[Call], last: Sequence[Call] = ()) -> None:
        facts = self._facts(calls)
        order = [rank for _, ranks in base.minority_first(facts) for rank in ranks]
        self.calls = tuple(sorted(calls, key=lambda call: order.index(call.rank)))
        self.last = tuple(last)
        values, remedy = self._values(facts), self._remedy(facts)
        sentence = base.refusal_sentence(self._call_text(), self._argument(), values, self.PROBLEM, remedy)
        details = [*base.likely_culprit_lines(facts), *base.call_lines(self.calls), *base.last_collective_lines(last)]
        super().__init__(sentence, details, [call.place for call in self.calls], order)

    def _facts(self, calls: Sequence[Call]) -> dict[int, str]:
        return {call.rank: self._fact(call) for call in calls}

    def _fact(self, call: Call) -> str:
        return self.FACT.format(call=call) if self.FACT else base.call_summary(replace(call, place=None))

    def _call_text(self) -> str:
        return base.call_summary(replace(self.calls[0], place=None))

    def _argument(self) -> str:
        return self.ARGUMENT

    def _values(self, facts: Mapping[int, str]) -> str:
        return base.facts_by_rank(facts)

    def _remedy(self, facts: Mapping[int, str]) -> str:
        return self.REMEDY


class KindMismatch(CollectiveMismatch):
    """Ranks call different collectives, or the same ones in another order."""

    FACT = "{call.kind}"
    ARGUMENT = "kind"
    PROBLEM = "the ranks of a group must call the same collectives in the same order"
    REMEDY = "Look above these lines for a branch or a loop that depends on the rank, and call the same on every rank."

    def _call_text(self) -> str:
        return f"call #{self.calls[0].number} in group {self.calls[0].group_name}"


class LengthMismatch(CollectiveMismatch):
    """Ranks bring different numbers of tensors to one call."""

    ARGUMENT = "tensors"
    PROBLEM = "each tensor needs its partner on every rank"
    REMEDY = "Bring as many on every rank: zeros where one has nothing to add, as for a parameter without gradient."

    def _fact(self, call: Call) -> str:
        return f"{len(call.tensors)} tensor{'s' if len(call.tensors) != 1 else ''}"


class _TensorMismatch(CollectiveMismatch):
    """Tensors differ: the message names the first that does."""

    def _argument(self) -> str:
        index = _first_difference(self.calls, self._of)
        return "tensor" if all(len(call.tensors) < 2 for call in self.calls) else f"tensors[{index}]"

    def _facts(self, calls: Sequence[Call]) -> dict[int, str]:
        index = _first_difference(calls, self._of)
        return {call.rank: self._of(call.tensors[index]) if call.tensors[index:] else "none" for call in calls}

    @staticmethod
    def _of(tensor: str) -> str:
        return tensor


class ShapeMismatch(_TensorMismatch):
    """Ranks bring tensors of different shapes."""

    PROBLEM = "the ranks of a group must bring one shape"

    @staticmethod
    def _of(tensor: str) -> str:
        return "[" + tensor.partition("[")[2].partition("]")[0] + "]"

    def _remedy(self, facts: Mapping[int, str]) -> str:
        kind = self.calls[0].kind.replace("_", "")
        if "broadcast" in kind:
            remedy = "Pass a tensor of the root's shape on every rank;"
            return f"{remedy} where only the root knows it, broadcast that first."
        if "scatter" in kind and "reduce" not in kind:
            return "Let each rank receive into a tensor of the shape that the root has for it."
        if "alltoall" in kind:
            return "Let each rank receive into a tensor of the shape that its peer sends."
        if len({prod(_shape_sizes(fact)) for fact in facts.values()}) == 1:
            return f"Reshape each tensor to {facts[min(facts)]}."
        if "gather" in kind:
            return f"{_to_one_shape(facts)}, and gather the sizes too, so that each rank can cut them back."
        return f"{_to_one_shape(facts)}, with what changes no result: 0 for a sum, 1 for a product."


class DtypeMismatch(_TensorMismatch):
    """Ranks bring tensors of different dtypes: one rank's bits would be read as another's numbers."""

    PROBLEM = "the ranks of a group must bring one dtype"

    @staticmethod
    def _of(tensor: str) -> str:
        return tensor.partition("[")[0]

    def _remedy(self, facts: Mapping[int, str]) -> str:
        most = base.minority_first(facts)[-1]
        to = f"{most[0]}, as most ranks do," if 2 * len(most[1]) > len(facts) else "one dtype"
        remedy = f"Convert to {to} with x.to(...) before the call;"
        return f"{remedy} see what autocast or a default dtype does on each rank."


class LayoutMismatch(_TensorMismatch):
    """Tensors of one shape have different memory orders, so that the wrong elements would be combined.

    A real backend combines memory, element by element; gloo does so silently, NCCL refuses such tensors.
    """

    PROBLEM = "the ranks of a group must lay their elements out in one order"
    REMEDY = "Pass x.contiguous() on every rank, and copy the result back."

    @staticmethod
    def _of(tensor: str) -> str:
        return tensor.partition("] ")[2] or "contiguous"


class DeviceMismatch(CollectiveMismatch):
    """Ranks bring tensors of different device types, for which torch has different backends."""

    FACT = "{call.device}"
    ARGUMENT = "device"
    PROBLEM = "the tensors of one collective lie on one kind of device, which one backend serves"
    REMEDY = "Move the tensors to one kind of device before the call, as x.to('cpu') or x.cuda() does."


class ReduceOpMismatch(CollectiveMismatch):
    """Ranks reduce by different operations."""

    FACT = "{call.op}"
    ARGUMENT = "op"
    PROBLEM = "the ranks of a group must reduce by the same operation"
    REMEDY = "Pass the same ReduceOp on every rank; where it is left out, it is SUM."


class RootMismatch(CollectiveMismatch):
    """Ranks name different roots."""

    FACT = "root {call.root}"
    ARGUMENT = "root"
    PROBLEM = "the ranks of a group must name the same root"
    REMEDY = "Name one root: src= and dst= count in the whole world, group_src= and group_dst= within the group."


class SplitMismatch(CollectiveMismatch):
    """A rank sends other sizes than its peer expects."""

    ARGUMENT = "split sizes"
    PROBLEM = "what a rank sends to a peer is what that peer must make room for"
    REMEDY = (
        "Let output_split_sizes[i] of rank j be input_split_sizes[j] of rank i, counted within the group; "
        "exchange sizes that depend on data first, in an all_to_all_single of one number for each rank."
    )

    def _fact(self, call: Call) -> str:
        return f"{_splits_text(call.input_splits)} in and {_splits_text(call.output_splits)} out"

    def _values(self, facts: Mapping[int, str]) -> str:
        for sender in self.calls:
            for receiver in self.calls:
                sent = _split_for(receiver, sender.input_splits, sender)
                room = _split_for(sender, receiver.output_splits, receiver)
                if sent is not None and room is not None and sent != room:
                    return f"rank {sender.rank} sends {sent} to rank {receiver.rank}, which makes room for {room}"
        return base.facts_by_rank(facts)


class GroupMismatch(CollectiveMismatch):
    """A process group has other members on one rank than on another: the ranks made groups in different orders.

    Members of () in `groups` mark a rank that belongs to the group and never made it.
    """

    def __init__(self, name: str, groups: Mapping[int, tuple[int, ...]], places: Mapping[int, Place | None]) -> None:
        self.calls, self.last = (), ()
        self.name, self.groups = name, dict(groups)
        facts = {rank: f"[{base.rank_ranges(ids)}]" if ids else "never made" for rank, ids in groups.items()}
        order = [rank for _, ranks in base.minority_first(facts) for rank in ranks]
        sentence = base.refusal_sentence(
            "new_group",
            "ranks",
            base.facts_by_rank(facts),
            f"process group {name} must have the same members on every rank",
            "Make all process groups on every rank, in the same order, also those that the rank is no member of.",
        )
        found = [places.get(rank) for rank in order]
        texts = [f"group {name}{' of' * bool(groups[rank])} {facts[rank]}" for rank in order]
        lines = [(rank, text + base.place_suffix(place)) for rank, text, place in zip(order, texts, found, strict=True)]
        details = [*base.likely_culprit_lines(facts), *base.merge_equal_lines(lines)]
        base.ProgramFault.__init__(self, sentence, details, found, order)


class MessageMismatch(CollectiveMismatch):
    """A matched send and recv of different dtypes or numbers of elements."""

    def __init__(self, send: Call, recv: Call) -> None:
        self.calls, self.last = (send, recv), ()
        self.send, self.recv = send, recv
        parts = {"shape": ShapeMismatch._of, "dtype": DtypeMismatch._of}
        odd = [name for name, of in parts.items() if [*map(of, send.tensors)] != [*map(of, recv.tensors)]]
        what = " and ".join(odd) or "number of tensors"
        sentence = base.refusal_sentence(
            base.call_summary(replace(recv, place=None)),
            "tensor",
            f"{', '.join(send.tensors)} sent by rank {send.rank}, "
            f"{', '.join(recv.tensors)} to receive it on rank {recv.rank}",
            f"a message and the tensor that receives it must have one {what}",
            "Receive into a tensor like the one that is sent; where the receiver cannot know it, send its shape first.",
        )
        places = [send.place, recv.place]
        base.ProgramFault.__init__(self, sentence, base.call_lines(self.calls), places, [send.rank, recv.rank])


def _first_difference(calls: Sequence[Call], of: Callable[[str], str]) -> int:
    """The index of the first tensor in which the calls differ; 0 if they do not."""
    least = min(len(call.tensors) for call in calls)
    return next((i for i in range(least) if len({of(call.tensors[i]) for call in calls}) > 1), 0)


def _to_one_shape(facts: Mapping[int, str]) -> str:
    shapes = [_shape_sizes(fact) for fact in facts.values()]
    if len({len(shape) for shape in shapes}) > 1:
        return f"Flatten each tensor and pad it to [{max(map(prod, shapes))}]"
    return f"Pad each tensor to [{','.join(str(max(sizes)) for sizes in zip(*shapes, strict=True))}]"


def _shape_sizes(shape: str) -> list[int]:
    """The sizes in a shape's short form.

    >>> _shape_sizes("[8,4]"), _shape_sizes("[]")
    ([8, 4], [])
    """
    return [int(size) for size in shape[1:-1].split(",") if size.isdecimal()]


def _splits_text(splits: tuple[int, ...] | None) -> str:
    return f"[{', '.join(map(str, splits))}]" if splits is not None else "equal pieces"


def _split_for(peer: Call, splits: tuple[int, ...] | None, call: Call) -> int | None:
    if splits is None or peer.rank not in call.group or len(splits) != len(call.group):
        return None
    return splits[call.group.index(peer.rank)]
