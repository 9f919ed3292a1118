"""One use of a public name of DTensor, as a step of a program: a function of one tensor, plain or distributed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Layout
from strategies.model.codec import placement_code, placements_code

R, S0, S1, LAST, SUM = Replicate(), Shard(0), Shard(1), Shard(-1), Partial("sum")
FLOATS, NUMBERS, MATRICES, ROWS, SEQUENCES = "floats", "numbers", "matrices", "rows", "sequences"
EVEN_SEQUENCES, INDICES, LOGITS = "even sequences", "indices", "logits"
"""The kinds of tensors that a step takes: of floats; of any numbers; two dims that all ranks cut evenly; two dims; three
dims; three that all ranks cut evenly; rows of a table; classes along dim 1."""


def any_layout(x: Tensor, layout: Layout) -> bool:
    """Whether a step takes a tensor in this layout: any."""
    return True


@dataclass(frozen=True, slots=True)
class PublicStep:
    """`call` as a user writes it, and the expression `code` of the tensor `x` that makes it.

    `takes` is the kind of tensor, `layouts` are those that x must be able to have besides its own, and `fits` says whether x
    may come in a layout.  Steps of all `group`s of a name are tried on each mesh.
    """

    call: str
    code: str
    takes: str = FLOATS
    layouts: tuple[Layout, ...] = ()
    fits: Callable[[Tensor, Layout], bool] = any_layout
    group: str = ""


def layouts_on(axes: int, placements: Sequence[Placement]) -> list[Layout]:
    """All layouts on a mesh of so many axes, of these placements."""
    return list(itertools.product(placements, repeat=axes))


def option_text(name: str, value: object) -> str:
    """Python text of an argument by keyword: `grad_placements=[Shard(0)]`."""
    if isinstance(value, Placement):
        return f"{name}={placement_code(value)}"
    if isinstance(value, (list, tuple)) and value and all(isinstance(p, Placement) for p in value):
        return f"{name}={placements_code(value)}"
    return f"{name}={value}"


def options_text(**options: object) -> str:
    """Python text of the arguments that are not None: `async_op=True, placements=[Shard(0)]`."""
    return ", ".join(option_text(name, value) for name, value in options.items() if value is not None)


def call_text(function: str, *first: str, **options: object) -> str:
    """Python text of a call: `distribute_tensor(x, mesh, placements=[Shard(0)])`."""
    return f"{function}({', '.join(text for text in (*first, options_text(**options)) if text)})"


def combined(**choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Each combination of the choices, by name."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
