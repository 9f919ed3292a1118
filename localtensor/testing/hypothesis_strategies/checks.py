"""What a caller of a strategy may pass: each argument is checked when the strategy is made, before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localtensor.errors.base import LocalTensorError, refusal
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import KINDS as REDUCTIONS

DTYPES = (
    torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128,
)  # fmt: skip
"""The dtypes that can be drawn; a counterexample shrinks towards the first."""
KINDS = ("R", "S", "SS", "P", *(f"P({reduction})" for reduction in REDUCTIONS))
"""The kinds of placement that can be asked for: `P` stands for each of the five that follow it."""


class BadDraw(LocalTensorError):
    """An argument with which nothing can be drawn."""

    def __init__(self, call: str, argument: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(refusal(f"draws.{call}", argument, f"{argument}={value!r}", problem, remedy))


def check_count(call: str, argument: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        remedy = f"Pass a whole number from {least} up."
        raise BadDraw(call, argument, value, f"it is no whole number of at least {least}", remedy)


def check_range(call: str, low: str, least: int, high: str, most: int) -> None:
    if least > most:
        problem = f"it is more than {high}={most}, so nothing is between them"
        raise BadDraw(call, low, least, problem, f"Pass {low} <= {high}.")


def check_dtype(call: str, value: object) -> None:
    if value is not None and value not in DTYPES:
        what = "it is not drawn here" if isinstance(value, torch.dtype) else "it is no torch.dtype"
        raise BadDraw(call, "dtype", value, what, f"Pass one of {', '.join(map(str, DTYPES))}, or None for any.")


def check_dtypes(call: str, values: Sequence[object]) -> None:
    if not isinstance(values, list | tuple) or not values:
        raise BadDraw(call, "dtypes", values, "it names no dtype", "Pass a tuple such as (torch.float32,).")
    for value in values:
        check_dtype(call, value if value is not None else "None")


def check_shape(call: str, value: object) -> None:
    if value is None:
        return
    whole = isinstance(value, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    if not whole or any(n < 0 for n in value):  # type: ignore[attr-defined]  # whole: it is a list or a tuple
        problem = "it is no tuple of sizes of 0 or more"
        raise BadDraw(call, "shape", value, problem, "Pass a tuple such as (5, 3), () for a scalar, or None for any.")


def check_names(call: str, argument: str, values: object, known: Sequence[str]) -> None:
    """That all of these are known, and that there is one at least."""
    if not isinstance(values, list | tuple) or not values:
        shown = ", ".join(map(repr, known))
        raise BadDraw(call, argument, values, "it is no tuple of names", f"Pass some of {shown}, in a tuple.")
    for value in values:
        if value not in known:
            problem = f"there is no {value!r}"
            raise BadDraw(call, argument, values, problem, f"Pass some of {', '.join(map(repr, known))}.")


def check_words(call: str, argument: str, values: object) -> None:
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, str) for value in values):
        raise BadDraw(call, argument, values, "it is no tuple of names", "Pass names in a tuple, such as ('add',).")


def check_mesh(call: str, value: object) -> None:
    if not isinstance(value, Mesh):
        raise BadDraw(call, "mesh", value, "it is no Mesh", "Pass one such as Mesh.of(dp=2, tp=4).")


def check_axis_names(call: str, names: object, most: int) -> None:
    fine = isinstance(names, list | tuple) and all(isinstance(name, str) and name.isidentifier() for name in names)
    if not fine or len(set(names)) < most or len(set(names)) < len(names):  # type: ignore[call-overload,arg-type]  # fine: it is a list or a tuple
        problem = f"these are not {most} different names"
        raise BadDraw(call, "names", names, problem, "Pass a name for each axis, such as ('dp', 'tp').")
