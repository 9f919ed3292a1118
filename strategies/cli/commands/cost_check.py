"""What `localtensor cost check` does once its options are read: the cost is found and tested, and the report printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from rich.console import Console

from localtensor.errors.base import LocalTensorError
from localtensor.layout.mesh import Mesh
from strategies.base.exits import CLEAN, NOTHING, USAGE, WRONG, wrote
from strategies.cli.commands.cost_check_torch import torch_cost
from strategies.planner.metric_check.check import BadCost, check
from strategies.planner.steps.prices import Sent, Time
from strategies.torch_api.user_modules import imported

OURS: dict[str, tuple[Callable[..., float], str]] = {
    "torch": (torch_cost, "s"), "time": (Time(), "ps"), "bytes": (Sent(), "bytes"),
}  # fmt: skip
"""torch's redistribute_cost, asked for pairs; and our prices of steps, by which plans are searched.  With their units."""
RANKS = 65536
"""On the largest mesh that is taken: torch's is a tensor of them."""


def run(cost: str, mesh: Sequence[int], shape: Sequence[int], most: int, as_json: bool) -> int:
    """The exit code: 0 it is a metric, 1 it is none, 2 it cannot be asked, 3 the report could not be written.

    `cost` is `torch`, `time`, `bytes` or `package.module:function`, which is looked for from the working folder.
    `most` broken triples, and as many answers that no cost gives, are shown.
    """
    try:
        _sizes(mesh, shape, most)
        with contextlib.redirect_stdout(sys.stderr):  # what the user's function prints is no part of the report
            function, unit = OURS.get(cost) or (found(cost, os.getcwd()), "")
            checked = check(function, Mesh.of(*mesh), shape, name=cost, unit=unit)
    except LocalTensorError as error:
        Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(str(error), markup=False)
        return USAGE
    text = json.dumps(checked.as_json(most), indent=2) if as_json else "\n".join(checked.lines(most))
    if problem := wrote(text + "\n"):
        Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(
            f"localtensor: {problem}", markup=False
        )
        return NOTHING
    return CLEAN if checked.holds else WRONG


def found(cost: str, folder: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, by the modules in `folder`.  Raises `BadCost`."""
    module, colon, name = cost.partition(":")
    if not colon or not name:
        near = get_close_matches(cost, OURS, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Use {', '.join(OURS)}, or write package.module:function."
        raise BadCost("cost", repr(cost), "there is no such cost", remedy)
    value: Any = imported(module, folder, partial(BadCost, "cost"))
    for part in name.split("."):
        if not hasattr(value, part):
            near = get_close_matches(part, [each for each in dir(value) if not each.startswith("_")], n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Name a function of it."
            raise BadCost("cost", repr(cost), f"{module} has no {name}", remedy)
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]  # check refuses what is no function


def _sizes(mesh: Sequence[int], shape: Sequence[int], most: int) -> None:
    shown = ",".join(map(str, mesh))
    if not mesh or min(mesh) < 1 or Mesh.of(*mesh).ranks > RANKS:
        raise BadCost("--mesh", shown or "''", f"this is no mesh of 1 to {RANKS} ranks", "Write --mesh 2,2.")
    if any(size < 0 for size in shape):
        shown = ",".join(map(str, shape))
        raise BadCost("--shape", shown, "a tensor has no such size", "Write --shape 8,8.")
    if most < 0:
        raise BadCost("--most", str(most), "fewer than none cannot be shown", "Write --most 5.")
