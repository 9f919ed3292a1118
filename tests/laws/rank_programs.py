"""Whole rank programs as data, and as the lines of ordinary torch.distributed code that each rank runs.

A program is a list of events for each rank.  Every step reads its input from the rank's accumulator `acc` and mixes
what it gets into it, so that one wrong number anywhere spoils all that follows.  Numbers are small integers, whatever
the dtype: every result is exact.  `render` writes one function a rank, in which no two events share a line, so that
a place in an error says which event of which rank it means.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import localtensor as lt
from localtensor.events import Place

SIZE, PRIME = 48, 1009  # of the accumulator: its elements, and all are below that prime
FILE = "/a user's project/rank_program.py"

IN_PLACE = ("all_reduce", "reduce", "broadcast")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
LISTS = ("scatter", "reduce_scatter", "all_to_all")  # each rank, or the root, brings a list
FUNCTIONAL = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
SPLITS = ("all_to_all_single",)
MESSAGES = ("message", "batch")
COLLECTIVES = (*IN_PLACE, "all_gather", "all_gather_into_tensor", "gather", *LISTS, "reduce_scatter_tensor", *SPLITS,
               "permute", "barrier", *OBJECTS)  # fmt: skip
KINDS = (*COLLECTIVES, *MESSAGES)


@dataclass(frozen=True)
class Step:
    """One collective, or messages that travel together, as one rank sees it.

    `members`, `root` and `pairs` are global ranks; `pairs` are senders and receivers, `order` where a permutation
    sends each member, `splits` the rows that each member sends to each.  `style` is "sync", "async" or "functional".
    """

    id: int
    kind: str
    group: int
    members: tuple[int, ...]
    style: str = "sync"
    dtype: str = "int64"
    shape: tuple[int, int] = (2, 1)
    op: str = "sum"
    root: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    tag: int = 0
    dim: int = 0
    layout: str = "plain"
    feed: tuple[int, int] = (1, 0)

    @property
    def involved(self) -> tuple[int, ...]:
        return tuple(sorted({rank for pair in self.pairs for rank in pair})) if self.pairs else self.members

    @property
    def blocks(self) -> bool:
        """The call returns once its peers have made theirs; so does a functional gather along another dim than 0."""
        return self.style == "sync" or (
            self.style == "functional" and self.kind == "all_gather_into_tensor" and self.dim > 0
        )

    def sends(self, rank: int) -> list[int]:
        return [receiver for sender, receiver in self.pairs if sender == rank]

    def recvs(self, rank: int) -> list[int]:
        return [sender for sender, receiver in self.pairs if receiver == rank]

    def brought(self, rank: int) -> tuple[int, ...] | None:
        """The shape of what the rank brings; None if it brings nothing."""
        rows, columns = self.shape
        many = len(self.members)
        if self.kind in MESSAGES:
            return (len(self.sends(rank)), rows, columns) if self.sends(rank) else None
        if self.kind in ("barrier", *OBJECTS) or (self.kind == "scatter" and rank != self.root):
            return None
        if self.kind in LISTS:
            return (many, rows, columns)
        if self.kind == "reduce_scatter_tensor":
            return (rows, many * columns) if self.dim else (many * rows, columns)
        if self.kind in SPLITS:
            return (sum(self.splits[self.members.index(rank)]), columns)
        return (rows * columns,) if self.kind == "permute" else (rows, columns)  # permute_tensor counts elements

    def gets(self, rank: int) -> bool:
        """Whether there is anything that the rank may look at afterwards."""
        if self.kind in ("reduce", "gather", "gather_object"):
            return rank == self.root
        return self.kind != "barrier" and not (self.kind in MESSAGES and not self.recvs(rank))

    def channels(self) -> set[object]:
        """Steps that share one must come in the same order on all ranks."""
        if self.kind in MESSAGES:
            return {(self.group, *pair, self.tag) for pair in self.pairs}
        return {self.group}


@dataclass(frozen=True)
class Event:
    """What one rank does next: group, launch, wait, mix, local, read, write, raise, return; `how` says in which way."""

    what: str
    step: Step | None = None
    how: str = ""


@dataclass(frozen=True)
class Program:
    groups: tuple[tuple[int, ...], ...]  # the first is all ranks, and is not made
    ranks: tuple[tuple[Event, ...], ...]

    def changed(self, rank: int, events: Sequence[Event]) -> "Program":
        return replace(self, ranks=(*self.ranks[:rank], tuple(events), *self.ranks[rank + 1 :]))

    def __str__(self) -> str:
        return render(self).source


# -- the words of the rendered programs


def feed(acc: Tensor, shape: Sequence[int], dtype: str, by: int, plus: int, times: int = 1) -> Tensor:
    """A fresh tensor of small numbers that depend on the accumulator; of both signs, if the dtype has them."""
    count = torch.Size(shape).numel()
    numbers = (acc[:count] * by + plus).remainder(11) - (0 if dtype == "uint8" else 5)
    return (numbers * times).to(getattr(torch, dtype)).reshape(shape)


def mix(acc: Tensor, got: Sequence[Any]) -> Tensor:
    """The accumulator, changed by everything that has been got."""
    numbers = [x.reshape(-1).to(torch.int64) if isinstance(x, Tensor) else torch.tensor(x) for x in got]
    flat = torch.cat(numbers)
    return torch.cat([acc[: len(flat)] * 3 + flat, acc[len(flat) :]]).remainder(PRIME)


def blank(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.full(tuple(shape), 99, dtype=getattr(torch, dtype))


class Planted(Exception):
    """What a program with a fault raises."""


# -- programs as text


@dataclass
class Rendered:
    source: str
    lines: dict[int, tuple[int, int]] = field(default_factory=dict)  # line -> rank, index of the event

    def events_at(self, places: Sequence[Place]) -> set[tuple[int, int]]:
        """(rank, index of the event) of each place."""
        return {self.lines[place.line] for place in places if place.file == FILE and place.line in self.lines}


def render(program: Program) -> Rendered:
    text: list[str] = []
    lines = {}
    for rank, events in enumerate(program.ranks):
        text += [f"def rank{rank}():", f"    out, acc, g0 = {{}}, torch.arange({SIZE}) * {rank + 1}, None"]
        for index, event in enumerate(events):
            for line in written(program, event, rank):
                text.append(f"    {line}")
                lines[len(text)] = rank, index
        text.append("    return acc, out")
    return Rendered("\n".join(text), lines)


def written(program: Program, event: Event, rank: int) -> Iterator[str]:
    """The lines of one event."""
    step, s = event.step, event.step.id if event.step else 0
    match event.what:
        case "group":
            yield f"g{event.how} = dist.new_group({list(program.groups[int(event.how)])})"
        case "local":
            yield f"acc = (acc * {event.how} + 1).remainder({PRIME})"
        case "raise":
            yield "raise Planted('on purpose')"
        case "return":
            yield "return acc, out"
        case "launch":
            yield from launched(step, rank)
        case "wait" if step.kind == "batch":
            yield f"[w.wait() for w in w{s}]"
        case "wait":
            yield {
                "poll": f"while not w{s}.is_completed(): pass",
                "future": f"w{s}.get_future().wait()",
                "functional": f"y{s} = functional.wait_tensor(y{s})",
            }.get(event.how, f"w{s}.wait()")
        case "mix" if step.kind in OBJECTS:
            yield f"out[{s}] = y{s}; acc = mix(acc, out[{s}])"
        case "mix":
            yield f"out[{s}] = [y + 0 for y in {results(step)}]; acc = mix(acc, out[{s}])"
        case "read":
            yield f"{results(step)}[0].sum()"
        case "write":
            yield f"{f'x{s}[0]' if step.kind in (*LISTS, *MESSAGES) else f'x{s}'}.add_(1)"


def results(step: Step) -> str:
    """A list of the tensors that the step leaves on its rank."""
    if step.style == "functional":
        return f"[y{step.id}]"
    if step.kind in IN_PLACE:
        return f"[x{step.id}]"
    return f"y{step.id}" if step.kind in ("all_gather", "gather", "all_to_all", *MESSAGES) else f"[y{step.id}]"


def launched(step: Step, rank: int) -> Iterator[str]:
    """What the rank brings, what it will get, and the call."""
    s, shape, root = step.id, step.brought(rank), rank == step.root
    if shape is not None:
        times = len(step.members) if step.op == "avg" and step.kind in REDUCING else 1
        turned = step.layout == "transposed"
        fed = f"feed(acc, {shape[::-1] if turned else shape}, '{step.dtype}', {step.feed[0]}, {step.feed[1]}, {times})"
        listed = step.kind in (*LISTS, *MESSAGES)
        if step.layout == "window":  # a piece of a larger buffer, which is written around it
            yield f"b{s} = blank({(shape[0] + 2, *shape[1:])}, '{step.dtype}'); b{s}[1:-1] = {fed}; x{s} = b{s}[1:-1]"
        else:
            yield f"x{s} = {fed}{'.t()' if turned else '.unbind()' if listed else ''}"
    elif step.kind == "scatter":
        yield f"x{s} = None"
    if step.kind in OBJECTS:
        yield from objects(step, rank, f"acc[:{rank % 3 + 1}].tolist()")
        return
    blanks = blank_shapes(step, rank)
    if blanks is not None and step.style != "functional":
        made = f"blank({step.shape if isinstance(blanks, int) else blanks}, '{step.dtype}')"
        yield f"y{s} = {f'[{made} for _ in range({blanks})]' if isinstance(blanks, int) else made}"
    elif step.kind == "gather":
        yield f"y{s} = {f'[blank({step.shape}, {step.dtype!r}) for _ in range({len(step.members)})]' if root else None}"
    yield from called(step, rank)
    if step.layout == "window":
        yield f"b{s}[0] += 1; b{s}[-1].sum()"


def blank_shapes(step: Step, rank: int) -> tuple[int, ...] | int | None:
    """The shape of the buffer in which the rank gets its result, or of how many buffers of the step's own shape."""
    rows, columns = step.shape
    if step.kind in SPLITS:
        me = step.members.index(rank)
        return (sum(row[me] for row in step.splits), columns)
    many = len(step.members)
    return {
        "all_gather": many, "all_to_all": many, "all_gather_into_tensor": (many * rows, columns),
        "scatter": step.shape, "reduce_scatter": step.shape, "reduce_scatter_tensor": step.shape,
        "message": len(step.recvs(rank)), "batch": len(step.recvs(rank)),
    }.get(step.kind)  # fmt: skip


def called(step: Step, rank: int) -> Iterator[str]:
    s, group = step.id, f"group=g{step.group}"
    if step.style == "functional" or step.kind == "permute":
        yield f"y{s} = {functional_call(step, rank)}"
        return
    if step.kind in MESSAGES:
        yield from messages(step, rank)
        return
    op = f"op=dist.ReduceOp.{step.op.upper()}, " if step.kind in REDUCING else ""
    me = step.members.index(rank)
    sent = list(step.splits[me]) if step.splits else []
    got = [row[me] for row in step.splits]
    arguments = {
        "all_reduce": f"x{s}, ", "reduce": f"x{s}, dst={step.root}, ", "broadcast": f"x{s}, src={step.root}, ",
        "gather": f"x{s}, y{s}, dst={step.root}, ", "scatter": f"y{s}, x{s} and list(x{s}), src={step.root}, ",
        "all_gather": f"y{s}, x{s}, ", "all_gather_into_tensor": f"y{s}, x{s}, ",
        "reduce_scatter": f"y{s}, list(x{s}), ", "all_to_all": f"y{s}, list(x{s}), ",
        "reduce_scatter_tensor": f"y{s}, x{s}, ", "all_to_all_single": f"y{s}, x{s}, {got}, {sent}, ", "barrier": "",
    }[step.kind]  # fmt: skip
    if step.style == "async":
        yield f"w{s} = dist.{step.kind}({arguments}{op}{group}, async_op=True)"
    else:
        yield f"dist.{step.kind}({arguments}{op}{group})"


def functional_call(step: Step, rank: int) -> str:
    x, group = f"x{step.id}", f"group=g{step.group} or dist.group.WORLD"
    if step.kind == "broadcast":  # the one that counts its root within the group
        return f"functional.broadcast({x}, {step.members.index(step.root)}, {group})"
    if step.kind == "all_to_all_single":
        me = step.members.index(rank)
        return (
            f"functional.all_to_all_single({x}, {[row[me] for row in step.splits]}, {list(step.splits[me])}, {group})"
        )
    return {
        "all_reduce": f"functional.all_reduce({x}, '{step.op}', {group})",
        "all_gather_into_tensor": f"functional.all_gather_single({x}, {step.dim}, {group})",
        "reduce_scatter_tensor": f"functional.reduce_scatter_single({x}, '{step.op}', {step.dim}, {group})",
        "permute": f"functional.permute_tensor({x}, {list(step.order)}, {group})",
    }[step.kind]


def messages(step: Step, rank: int) -> Iterator[str]:
    s, rest = step.id, f"group=g{step.group}, tag={step.tag}"
    if step.kind == "batch":
        ops = [
            f"dist.P2POp(dist.isend, x{s}[{i}], {to}, g{step.group}, {step.tag})"
            for i, to in enumerate(step.sends(rank))
        ]
        ops += [
            f"dist.P2POp(dist.irecv, y{s}[{i}], {by}, g{step.group}, {step.tag})"
            for i, by in enumerate(step.recvs(rank))
        ]
        started = f"dist.batch_isend_irecv([{', '.join(ops)}])"
        yield f"w{s} = {started}" if step.style == "async" else f"[w.wait() for w in {started}]"
        return
    way = (
        f"send(x{s}[0], {step.sends(rank)[0]}, {rest})"
        if step.sends(rank)
        else f"recv(y{s}[0], {step.recvs(rank)[0]}, {rest})"
    )
    yield f"w{s} = dist.i{way}" if step.style == "async" else f"dist.{way}"


def objects(step: Step, rank: int, mine: str) -> Iterator[str]:
    s, group, root, many = step.id, f"group=g{step.group}", rank == step.root, len(step.members)
    match step.kind:
        case "all_gather_object":
            yield f"y{s} = [None] * {many}; dist.all_gather_object(y{s}, {mine}, {group})"
        case "broadcast_object_list":
            yield f"y{s} = [{mine if root else None}]; dist.broadcast_object_list(y{s}, src={step.root}, {group})"
        case "gather_object":
            yield f"y{s} = {f'[None] * {many}' if root else None}; dist.gather_object({mine}, y{s}, dst={step.root}, {group})"
        case "scatter_object_list":
            whole = f"[{mine} + [i] for i in range({many})]" if root else "None"
            yield f"y{s} = [None]; dist.scatter_object_list(y{s}, {whole}, src={step.root}, {group})"


# -- runs


def simulated(program: Program, schedule: Any = None, timeout: float = 20.0) -> lt.Run:
    """What lt.run makes of the program: of each rank its accumulator, and what it got from each step."""
    words = {
        "torch": torch,
        "dist": dist,
        "functional": functional,
        "feed": feed,
        "mix": mix,
        "blank": blank,
        "Planted": Planted,
    }
    exec(compile(render(program).source, FILE, "exec"), words)

    def body() -> Any:
        return words[f"rank{dist.get_rank()}"]()

    return lt.run(body, ranks=len(program.ranks), schedule=schedule, timeout=timeout, leftovers="ignore")
