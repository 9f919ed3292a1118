"""A rank program as a value: its repr is code that runs, it runs on every backend of `run`, and has expected results.

An event becomes lines of ordinary torch.distributed code.  The printed code contains `feed`, `mix` and `blank`
themselves, which therefore use nothing of this project.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from localtensor._util.events import Place
from localtensor.testing.hypothesis_strategies.values import print_repr
from tests.properties.programs.model import (
    IN_PLACE,
    LISTS,
    MESSAGES,
    OBJECTS,
    PRIME,
    REDUCING,
    SIZE,
    SPLITS,
    Event,
    Step,
)
from tests.properties.programs.reference import ReferenceRun


def event_lines(groups: Sequence[tuple[int, ...]], event: Event, rank: int) -> Iterator[str]:
    """The lines of code of one event."""
    step, s = event.call, event.call.id
    match event.what:
        case "group":
            yield f"g{event.how} = dist.new_group({list(groups[int(event.how)])})"
        case "local":
            yield f"acc = (acc * {event.how} + 1).remainder({PRIME})"
        case "close":  # no rank ends while another still communicates with it
            yield f"dist.barrier(); [dist.destroy_process_group(g) for g in ({event.how})]"
        case "raise":
            yield "raise Planted('on purpose')"
        case "return":
            yield "return acc, out"
        case "launch":
            yield from launch_lines(step, rank)
        case "wait":
            yield wait_line(step, event.how)
        case "mix" if step.kind in OBJECTS:
            yield f"out[{s}] = y{s}; acc = mix(acc, out[{s}])"
        case "mix":
            yield f"out[{s}] = [y + 0 for y in {results_expression(step)}]; acc = mix(acc, out[{s}])"
        case "read":
            yield f"{results_expression(step)}[0].sum()"
        case "write":
            yield f"{f'x{s}[0]' if step.kind in (*LISTS, *MESSAGES) else f'x{s}'}.add_(1)"


def wait_line(step: Step, how: str) -> str:
    s = step.id
    if step.kind == "batch":
        return f"[w.wait() for w in w{s}]"
    ways = {
        "poll": f"while not w{s}.is_completed(): pass",
        "future": f"w{s}.get_future().wait()",
        "functional": f"y{s} = functional.wait_tensor(y{s})",
    }
    return ways.get(how, f"w{s}.wait()")


def results_expression(step: Step) -> str:
    """The expression of a list of the tensors that the step leaves on its rank."""
    if step.style == "functional":
        return f"[y{step.id}]"
    if step.kind in IN_PLACE:
        return f"[x{step.id}]"
    return f"y{step.id}" if step.kind in ("all_gather", "gather", "all_to_all", *MESSAGES) else f"[y{step.id}]"


def launch_lines(step: Step, rank: int) -> Iterator[str]:
    """The lines of the rank's input, its output buffers, and the call."""
    s, shape, root = step.id, step.brought(rank), rank == step.root
    if shape is not None:
        times = len(step.members) if step.op == "avg" and step.kind in REDUCING else 1
        turned = step.layout == "transposed"
        fed = f"feed(acc, {shape[::-1] if turned else shape}, '{step.dtype}', {step.feed[0]}, {step.feed[1]}, {times})"
        listed = step.kind in (*LISTS, *MESSAGES)
        if step.layout == "window":  # a slice of a larger buffer, whose border is written during the call
            yield f"b{s} = blank({(shape[0] + 2, *shape[1:])}, '{step.dtype}'); b{s}[1:-1] = {fed}; x{s} = b{s}[1:-1]"
        else:
            yield f"x{s} = {fed}{'.t()' if turned else '.unbind()' if listed else ''}"
    elif step.kind == "scatter":
        yield f"x{s} = None"
    if step.kind in OBJECTS:
        yield from object_call_lines(step, rank, f"acc[:{rank % 3 + 1}].tolist()")
        return
    blanks = blank_shapes(step, rank)
    if blanks is not None and step.style != "functional":
        made = f"blank({step.shape if isinstance(blanks, int) else blanks}, '{step.dtype}')"
        yield f"y{s} = {f'[{made} for _ in range({blanks})]' if isinstance(blanks, int) else made}"
    elif step.kind == "gather":
        yield f"y{s} = {f'[blank({step.shape}, {step.dtype!r}) for _ in range({len(step.members)})]' if root else None}"
    yield from collective_lines(step, rank)
    if step.layout == "window":
        yield f"b{s}[0] += 1; b{s}[-1].sum()"


def blank_shapes(step: Step, rank: int) -> tuple[int, ...] | int | None:
    """The shape of the rank's output buffer, or the number of its output buffers of the step's own shape."""
    rows, columns = step.shape
    if step.kind in SPLITS:
        me = step.members.index(rank)
        return (sum(row[me] for row in step.splits), columns)
    many = len(step.members)
    shapes: dict[str, tuple[int, ...] | int] = {
        "all_gather": many, "all_to_all": many, "all_gather_into_tensor": (many * rows, columns),
        "scatter": step.shape, "reduce_scatter": step.shape, "reduce_scatter_tensor": step.shape,
        "message": len(step.recvs(rank)), "batch": len(step.recvs(rank)),
    }  # fmt: skip
    return shapes.get(step.kind)


def collective_lines(step: Step, rank: int) -> Iterator[str]:
    s, group = step.id, f"group=g{step.group}"
    if step.style == "functional" or step.kind == "permute":
        yield f"y{s} = {functional_call(step, rank)}"
        return
    if step.kind in MESSAGES:
        yield from message_lines(step, rank)
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
    if step.kind == "broadcast":  # the only one whose root is a rank within the group
        return f"functional.broadcast({x}, {step.members.index(step.root)}, {group})"
    if step.kind == "all_to_all_single":
        me = step.members.index(rank)
        got, sent = [row[me] for row in step.splits], list(step.splits[me])
        return f"functional.all_to_all_single({x}, {got}, {sent}, {group})"
    return {
        "all_reduce": f"functional.all_reduce({x}, '{step.op}', {group})",
        "all_gather_into_tensor": f"functional.all_gather_single({x}, {step.dim}, {group})",
        "reduce_scatter_tensor": f"functional.reduce_scatter_single({x}, '{step.op}', {step.dim}, {group})",
        "permute": f"functional.permute_tensor({x}, {list(step.order)}, {group})",
    }[step.kind]


def message_lines(step: Step, rank: int) -> Iterator[str]:
    s, rest = step.id, f"group=g{step.group}, tag={step.tag}"
    if step.kind == "batch":
        peers = [("isend", f"x{s}[{i}]", to) for i, to in enumerate(step.sends(rank))]
        peers += [("irecv", f"y{s}[{i}]", by) for i, by in enumerate(step.recvs(rank))]
        ops = [f"dist.P2POp(dist.{way}, {buffer}, {peer}, g{step.group}, {step.tag})" for way, buffer, peer in peers]
        started = f"dist.batch_isend_irecv([{', '.join(ops)}])"
        yield f"w{s} = {started}" if step.style == "async" else f"[w.wait() for w in {started}]"
        return
    if step.sends(rank):
        call = f"send(x{s}[0], {step.sends(rank)[0]}, {rest})"
    else:
        call = f"recv(y{s}[0], {step.recvs(rank)[0]}, {rest})"
    yield f"w{s} = dist.i{call}" if step.style == "async" else f"dist.{call}"


def object_call_lines(step: Step, rank: int, mine: str) -> Iterator[str]:
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


def feed(acc: Tensor, shape: Sequence[int], dtype: str, by: int, plus: int, times: int = 1) -> Tensor:
    """A fresh tensor of small numbers that depend on the accumulator; of both signs, if the dtype has them."""
    count = torch.Size(shape).numel()
    numbers = (acc[:count] * by + plus).remainder(11) - (0 if dtype == "uint8" else 5)
    return (numbers * times).to(getattr(torch, dtype)).reshape(shape)


def mix(acc: Tensor, got: Sequence[Any]) -> Tensor:
    """The accumulator, changed by all results."""
    numbers = [x.reshape(-1).to(torch.int64) if isinstance(x, Tensor) else torch.tensor(x) for x in got]
    flat = torch.cat(numbers)
    return torch.cat([acc[: len(flat)] * 3 + flat, acc[len(flat) :]]).remainder(PRIME)


def blank(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.full(tuple(shape), 99, dtype=getattr(torch, dtype))


class Planted(Exception):
    """The exception of a program with a planted fault."""


FILE = "a drawn rank program"
"""The file name of a program's lines in errors."""
_WORDS = (feed, mix, blank, Planted)
_HEAD = """from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
"""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a program, and for each line of an event the rank and the event's index in the rank's list."""

    source: str
    lines: dict[int, tuple[int, int]]

    def events_at(self, places: Sequence[Place]) -> set[tuple[int, int]]:
        """(rank, index of the event) of each place."""
        return {self.lines[place.line] for place in places if place.file == FILE and place.line in self.lines}


@dataclass(frozen=True, slots=True, repr=False)
class RankProgram:
    """A whole torch.distributed program: `events[rank]` are the actions of that rank, in order.

    `groups` are the members of each group; the first is all ranks, and is not made.  Called on a rank, it runs that
    rank's part and returns the rank's accumulator, int64[48], and the rank's results of each step, by its number.
    `print(program)` shows the code.

    >>> from localtensor import run
    >>> from localtensor.testing.compare_runs import assert_same
    >>> from tests.properties.programs.model import Step
    >>> total = Step(0, "all_reduce", 0, (0, 1))
    >>> program = RankProgram(((0, 1),), ((Event("launch", total), Event("mix", total)),) * 2)
    >>> assert_same(run(program, ranks=program.ranks), program.expected())
    """

    groups: tuple[tuple[int, ...], ...]
    events: tuple[tuple[Event, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks that it is for."""
        return len(self.events)

    def __call__(self) -> Any:
        """The result of the calling rank.  Raises `RuntimeError` for a wrong number of ranks."""
        if dist.get_world_size() != self.ranks:
            raise RuntimeError(f"this program is for {self.ranks} ranks, and there are {dist.get_world_size()}")
        words: dict[str, Any] = {"__name__": FILE}
        exec(
            _compiled(str(self)), words
        )  # its own text and nothing else, so that the printed code is the code that runs
        return words["program"]()

    def expected(self) -> list[Any]:
        """The expected result of each rank, computed by plain loops over numpy arrays, without a simulator.

        Raises `Illegal` where the program is wrong, which no drawn program is.
        """
        return [(_tensor(acc), {s: [*map(_tensor, got)] for s, got in out.items()}) for acc, out in self.played()]

    def played(self) -> list[tuple[Any, dict[int, list[Any]]]]:
        """The expected results as numpy arrays."""
        return ReferenceRun(self.groups, self.events).play()

    def changed(self, rank: int, events: Sequence[Event]) -> RankProgram:
        """The program with other events of that rank."""
        return replace(self, events=(*self.events[:rank], tuple(events), *self.events[rank + 1 :]))

    def rendered(self) -> Rendered:
        """The text with its map from lines to events.  No two events share a line."""
        raises = any(event.what == "raise" for events in self.events for event in events)
        text = [_HEAD, f"PRIME = {PRIME}"]
        text += [f"\n\n{inspect.getsource(word).rstrip()}" for word in _WORDS if word.__name__ != "Planted" or raises]
        text = "\n".join(text).split("\n")
        lines: dict[int, tuple[int, int]] = {}
        for rank, events in enumerate(self.events):
            text += ["", "", f"def rank{rank}():", f"    out, acc, g0 = {{}}, torch.arange({SIZE}) * {rank + 1}, None"]
            for index, event in enumerate(events):
                for line in event_lines(self.groups, event, rank):
                    text.append(f"    {line}")
                    lines[len(text)] = rank, index
            text.append("    return acc, out")
        listed = ", ".join(f"rank{rank}" for rank in range(self.ranks))
        text += ["", "", "def program():", f"    return [{listed}][dist.get_rank()]()"]
        return Rendered("\n".join(text) + "\n", lines)

    def __repr__(self) -> str:
        return self.rendered().source

    _repr_pretty_ = print_repr


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    return compile(source, FILE, "exec")


def _tensor(x: object) -> object:
    return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
