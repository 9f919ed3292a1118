"""What is a little smaller than a program: the stages of shrinking, in their fixed order.

| stage     | what it tries                                                                            |
|-----------|------------------------------------------------------------------------------------------|
| ranks     | an axis on 2 ranks, then 3, up to one less; sharded sizes cut to go with them            |
| axes      | an axis of the mesh left out; no flattened submesh                                       |
| operands  | nothing after the op; an optional tensor left out; fewer tensors of a list; R everywhere |
| dims      | a dim left out; sizes cut to 1, 2, ranks, ranks + 1, half, one less                      |
| scalars   | an argument left out or at its default; numbers at 0, 1, 2, one decimal                  |
| values    | zeros, ones, 1 2 3, small whole numbers, one decimal, no NaN; then element by element    |

Each stage is a function from a program to candidates, the boldest first.  A candidate may be one that
the op refuses, or that shows nothing: whoever searches asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch.distributed.tensor import Replicate

from strategies.inputs.variants.call_edits import named, put, without
from strategies.model.program import Program
from strategies.model.rule import Leaf, overload
from strategies.programs.shrink.sizes import fewer_dims, sized_for, smaller_sizes
from strategies.programs.shrink.values import simpler_scalars, simpler_values

Stage = Callable[[Program], Iterator[Program]]


def fewer_ranks(program: Program) -> Iterator[Program]:
    """The program with an axis on fewer ranks, 2 first."""
    for axis, size in enumerate(program.mesh):
        for ranks in range(2, size):
            yield from sized_for(program, axis, ranks)


def fewer_axes(program: Program) -> Iterator[Program]:
    """The program with an axis of its mesh left out, and without a flattened submesh."""
    for axis in reversed(range(len(program.mesh))) if len(program.mesh) > 1 else ():
        mesh = (*program.mesh[:axis], *program.mesh[axis + 1 :])
        yield replace(program, mesh=mesh, inputs=tuple((*p[:axis], *p[axis + 1 :]) for p in program.inputs))
    if program.flattened:
        yield replace(program, flattened=False)


def fewer_operands(program: Program) -> Iterator[Program]:
    """The program without what follows, without an optional tensor, with shorter lists, with more replicas."""
    if program.then:
        yield replace(program, then="")
    call = program.sample.call
    schema = {a.name: a for a in overload(call.op)._schema.arguments}
    for where, name, value in named(call):
        if isinstance(value, Leaf) and str(schema[name].type).startswith("Optional"):
            yield without(program, put(call, (where,), None), [value.index])
    yield from _shorter_lists(program)
    if len(program.mesh) == 1 and not program.then:
        return  # the inputs of a rule are its name
    for i, column in enumerate(program.inputs):
        for axis, placement in enumerate(column):
            if placement != Replicate():
                other = (*column[:axis], Replicate(), *column[axis + 1 :])
                yield replace(program, inputs=(*program.inputs[:i], other, *program.inputs[i + 1 :]))


def _shorter_lists(program: Program) -> Iterator[Program]:
    """All lists of tensors of one length lose the same element, or all but the first."""
    call = program.sample.call
    lists = [(w, v) for w, _, v in named(call) if isinstance(v, (list, tuple)) and v and isinstance(v[0], Leaf)]
    for length in sorted({len(v) for _, v in lists if len(v) > 1}):
        for drop in ([*range(1, length)], *([i] for i in reversed(range(length)))):
            one, gone = call, []
            for where, value in lists:
                if len(value) == length and all(isinstance(v, Leaf) for v in value):
                    gone += [value[i].index for i in drop]
                    one = put(one, (where,), type(value)([v for i, v in enumerate(value) if i not in drop]))
            if gone:
                yield without(program, one, gone)


def smaller_dims(program: Program) -> Iterator[Program]:
    """The program with a dim less, and with smaller sizes."""
    yield from fewer_dims(program)
    yield from smaller_sizes(program)


STAGES: tuple[tuple[str, Stage], ...] = (
    ("ranks", fewer_ranks),
    ("axes", fewer_axes),
    ("operands", fewer_operands),
    ("dims", smaller_dims),
    ("scalars", simpler_scalars),
    ("values", simpler_values),
)
"""The order is part of what is promised: the same finding shrinks to the same case."""
