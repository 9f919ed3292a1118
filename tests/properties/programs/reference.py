"""The slow reference of a rank program: plain loops over numpy arrays, one rank after the other.

It shares no code with the engine.  It computes the final values of each rank, or raises `IllegalProgram` for a program
that is wrong under any schedule.  So an injected fault is harmless exactly if the reference still completes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.properties.programs import model

BINARY_OPS = {
    "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


class IllegalProgram(Exception):
    """The program is wrong: it hangs, or its results are undefined."""


def reduce_arrays(held: list[Any], op: str) -> Any:
    total = held[0]
    for x in held[1:]:
        total = BINARY_OPS[op](total, x)
    return (total / len(held)).astype(total.dtype) if op == "avg" else total


def collective_results(step: model.Step, rank: int, steps: dict[int, model.Step], brought: dict[int, Any]) -> list[Any]:
    """The rank's results of a collective, as its own call requests them."""
    me, held = step.members.index(rank), [brought[member] for member in step.members]
    match step.kind:
        case "broadcast" | "broadcast_object_list":
            return [brought[step.root]]
        case "all_gather" | "gather" | "all_gather_object" | "gather_object":
            return held
        case "all_gather_into_tensor":
            return [np.concatenate(held, step.dim)]
        case "scatter":
            return [brought[step.root][me]]
        case "scatter_object_list":
            return [[*brought[step.root], me]]
        case "all_to_all":
            return [x[me] for x in held]
        case "all_to_all_single":
            starts = [sum(steps[member].splits[i][:me]) for i, member in enumerate(step.members)]
            rows = [steps[member].splits[i][me] for i, member in enumerate(step.members)]
            cuts = [slice(start, start + many) for start, many in zip(starts, rows, strict=True)]
            return [np.concatenate([x[cut] for x, cut in zip(held, cuts, strict=True)])]
        case "permute":
            return [held[step.order.index(me)]]
    return reduction_results(step, me, held, steps)


def reduction_results(step: model.Step, me: int, held: list[Any], steps: dict[int, model.Step]) -> list[Any]:
    match step.kind:
        case "all_reduce" | "reduce":
            return [reduce_arrays(held, step.op)]
        case "reduce_scatter":
            return [reduce_arrays([x[me] for x in held], step.op)]
        case "reduce_scatter_tensor":
            dims = [steps[member].dim for member in step.members]
            wire = [np.concatenate(np.split(x, len(held), dim)) for x, dim in zip(held, dims, strict=True)]
            return [np.split(reduce_arrays(wire, step.op), len(held))[me]]
    return []


def arguments_agree(steps: list[model.Step]) -> bool:
    """Whether the arguments of these ranks for one collective agree."""
    if len({shared_arguments(step) for step in steps}) > 1:
        return False
    many = range(len(steps))
    if steps[0].kind == "permute":
        return all(np.prod(steps[i].shape) == np.prod(steps[steps[0].order[i]].shape) for i in many)
    agree = (steps[i].splits[i][j] == steps[j].splits[i][j] for i in many for j in many)
    return steps[0].kind not in model.SPLITS or all(agree)


def shared_arguments(step: model.Step) -> tuple[object, ...]:
    """The arguments that must be equal on all ranks."""
    root = step.root if step.kind in model.ROOTED else None
    if step.kind in ("barrier", *model.OBJECTS):
        return step.kind, root
    shape = {"permute": step.order, "all_to_all_single": step.shape[1]}.get(step.kind, step.shape)
    return step.kind, root, step.op if step.kind in model.REDUCING else "", step.dtype, shape


class ReferenceRank:
    """One rank of the reference: its position, and its values."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at, self.left = rank, 0, False
        self.acc = np.arange(model.SIZE) * (rank + 1)
        self.out: dict[int, list[Any]] = {}
        self.made: list[int] = []  # groups, in the order in which it made them
        self.launched = False  # whether it is inside a blocking call
        # step in flight -> whether writing its input, reading its output is a race; in the order of their launches
        self.flying: dict[int, tuple[bool, bool]] = {}
        self.steps: dict[int, model.Step] = {}  # those that were launched, by their id

    def fed(self, step: model.Step) -> Any:
        shape = step.brought(self.rank)
        if step.kind in model.OBJECTS:
            return self.acc[: self.rank % 3 + 1].tolist()
        if shape is None:
            return None
        count, times = int(np.prod(shape)), len(step.members) if step.op == "avg" and step.kind in model.REDUCING else 1
        numbers = (self.acc[:count] * step.feed[0] + step.feed[1]) % 11 - (0 if step.dtype == "uint8" else 5)
        numbers = (numbers * times).astype(step.dtype)
        return numbers.reshape(shape[::-1]).T if step.layout == "transposed" else numbers.reshape(shape)

    def mix(self, results: list[Any]) -> None:
        flat = [int(number) for x in results for number in np.asarray(x).reshape(-1)]
        for i, number in enumerate(flat):
            self.acc[i] = self.acc[i] * 3 + number
        self.acc %= model.PRIME


class ReferenceRun:
    """All ranks of the reference, and the collectives and messages in flight between them."""

    def __init__(self, groups: Sequence[tuple[int, ...]], events: Sequence[Sequence[model.Event]]) -> None:
        self.groups, self.events = groups, events
        self.ranks = [ReferenceRank(rank) for rank in range(len(events))]
        self.count: dict[tuple[int, int], int] = defaultdict(int)  # (group, rank) -> collectives so far
        self.meetings: dict[tuple[int, int], dict[int, tuple[model.Step, Any]]] = defaultdict(dict)
        self.sends: dict[object, list[tuple[model.Step, Any]]] = defaultdict(list)
        self.recvs: dict[object, list[model.Step]] = defaultdict(list)
        self.stake: dict[tuple[int, int], list[Any]] = {}  # (rank, step) -> what must complete

    def play(self) -> list[tuple[Any, dict[int, list[Any]]]]:
        """The final values of each rank.  Raises `IllegalProgram`."""
        while any([self.moved(rank) for rank in self.ranks]):
            pass
        if not all(rank.left for rank in self.ranks):
            raise IllegalProgram("ranks wait for ever")
        if any(len(self.sends[channel]) != len(self.recvs[channel]) for channel in {*self.sends, *self.recvs}):
            raise IllegalProgram("unmatched messages")
        if any(rank.flying for rank in self.ranks):
            raise IllegalProgram("work without a wait")
        if any(len(parts) < len(step.members) for parts in self.meetings.values() for step, _ in parts.values()):
            raise IllegalProgram("a collective without all members")
        for n in range(max(len(rank.made) for rank in self.ranks)):
            makers = self.check_made(n)
            if 0 < sum(rank in makers for rank in makers[min(makers)]) < len(makers[min(makers)]):
                # A rank that is no member may leave the last out.
                raise IllegalProgram("a group that one of its members never makes")
        return [(rank.acc, rank.out) for rank in self.ranks]

    def check_made(self, n: int) -> dict[int, tuple[int, ...]]:
        """The members of the n-th group, by the ranks that have made it.  Raises `IllegalProgram` if they differ.

        Groups of one rank each are not: none of them waits for another.
        """
        made = {rank.rank: self.groups[rank.made[n]] for rank in self.ranks if n < len(rank.made)}
        if len(set(made.values())) > 1 and any(len(members) > 1 for members in made.values()):
            raise IllegalProgram("groups made in another order")
        return made

    def moved(self, rank: ReferenceRank) -> bool:
        """Advances the rank as far as it can go; False if it could not."""
        before = rank.at
        events = self.events[rank.rank]
        while not rank.left and (rank.at == len(events) or self.done(rank, events[rank.at])):
            rank.left = rank.left or rank.at == len(events)
            rank.at += 1
        return rank.at != before

    def done(self, rank: ReferenceRank, event: model.Event) -> bool:
        """Executes the event; False if the rank must wait."""
        step = event.call
        match event.what:
            case "group":
                rank.made.append(int(event.how))
                self.check_made(len(rank.made) - 1)
            case "local":
                rank.acc = (rank.acc * int(event.how) + 1) % model.PRIME
            case "return":
                rank.left = True
            case "raise":
                raise IllegalProgram("a rank raises")
            case "launch":
                return self.launch(rank, step)
            case "wait":
                if not self.over(rank, step):
                    return False
                self.complete_before(rank, step)
                rank.flying.pop(step.id, None)
            case "mix":
                return self.mixed(rank, step)
            case "read" if rank.flying.get(step.id, (False, False))[1]:
                raise IllegalProgram("an output is read before its wait")
            case "write" if rank.flying.get(step.id, (False, False))[0]:
                raise IllegalProgram("a buffer is written before its wait")
        return True

    def launch(self, rank: ReferenceRank, step: model.Step) -> bool:
        if not rank.launched:
            rank.steps[step.id] = step
            x = rank.fed(step)
            (self.post if step.kind in model.MESSAGES else self.join)(rank.rank, step, x)
            if step.style == "async":
                held = x is not None and x.size > 0
                takes = step.kind in model.IN_PLACE and held
                rank.flying[step.id] = (
                    held,
                    takes or (step.kind not in model.IN_PLACE and self.size(step, rank.rank) > 0),
                )
        rank.launched = step.blocks and not self.over(rank, step)
        if step.blocks and not rank.launched:
            self.complete_before(rank, step)
        return not rank.launched

    def complete_before(self, rank: ReferenceRank, barrier: model.Step) -> None:
        """What gloo's barrier waits for: the rank's earlier collectives of its group (torch, ProcessGroupGloo.cpp)."""
        earlier = (
            list(itertools.takewhile(lambda number: number != barrier.id, rank.flying))
            if barrier.kind == "barrier"
            else []
        )
        for number in earlier:
            if rank.steps[number].group == barrier.group and rank.steps[number].kind not in model.MESSAGES:
                del rank.flying[number]

    def size(self, step: model.Step, rank: int) -> int:
        rows, columns = step.shape
        if step.kind in model.SPLITS:
            rows = sum(row[step.members.index(rank)] for row in step.splits)
        return rows * columns if step.gets(rank) else 0

    def known(self, rank: int, step: model.Step) -> int:
        """The number of the group in the order of its making, since two groups may have the same members."""
        return self.ranks[rank].made.index(step.group) + 1 if step.group else 0

    def join(self, rank: int, step: model.Step, x: object) -> None:
        group = self.known(rank, step)
        place = group, self.count[group, rank]
        self.count[group, rank] += 1
        self.meetings[place][rank] = step, x
        self.stake[rank, step.id] = [place]
        parts = self.meetings[place]
        if len(parts) == len(step.members) and not arguments_agree([parts[member][0] for member in step.members]):
            raise IllegalProgram("parts that do not fit")

    def post(self, rank: int, step: model.Step, x: Sequence[Any]) -> None:
        stake: list[Any] = []
        group = self.known(rank, step)
        self.stake[rank, step.id] = stake
        for i, to in enumerate(step.sends(rank)):
            channel = (group, rank, to, step.tag)
            self.sends[channel].append((step, x[i]))
            stake.append((channel, len(self.sends[channel]), False))
        for by in step.recvs(rank):
            channel = (group, by, rank, step.tag)
            self.recvs[channel].append(step)
            stake.append((channel, len(self.recvs[channel]), True))

    def over(self, rank: ReferenceRank, step: model.Step) -> bool:
        for place in self.stake[rank.rank, step.id]:
            if step.kind not in model.MESSAGES:
                if len(self.meetings[place]) < len(step.members):
                    return False
                continue
            channel, number, _ = place
            if min(len(self.sends[channel]), len(self.recvs[channel])) < number:
                return False
            sent, taken = self.sends[channel][number - 1][0], self.recvs[channel][number - 1]
            if (sent.dtype, sent.shape) != (taken.dtype, taken.shape):
                raise IllegalProgram("a message that does not fit")
        return True

    def mixed(self, rank: ReferenceRank, step: model.Step) -> bool:
        if rank.flying.get(step.id, (False, False))[1]:
            raise IllegalProgram("an output is read before its wait")
        if not self.over(rank, step):  # a functional collective waits here
            return step.style == "async"
        if step.kind in model.MESSAGES:
            stakes = self.stake[rank.rank, step.id]
            results = [self.sends[channel][number - 1][1] for channel, number, receives in stakes if receives]
        else:
            parts = self.meetings[self.stake[rank.rank, step.id][0]]
            steps, brought = ({m: part[i] for m, part in parts.items()} for i in (0, 1))
            results = collective_results(step, rank.rank, steps, brought)
        rank.out[step.id] = results
        rank.mix(results)
        return True
