"""Python that makes the same plan as a command line did."""

from __future__ import annotations

from strategies.planner.steps.prices import TOPOLOGY
from strategies.planner.text.options import BYS, Asked, BadPlanOption
from strategies.planner.text.parser import text_of


def code_of(asked: Asked) -> str:
    """A few lines to paste.  Raises `BadPlanOption` for a price of a user's own, which is no value that can be written.

    >>> from strategies.planner.text.options import asked
    >>> print(code_of(asked("f32[8] @ dp=2: S(0) -> R", by="bytes", memory="1kB")))
    from strategies.planner.text.parser import read
    from strategies.planner.search.api import plan
    from strategies.planner.steps.prices import Sent
    <BLANKLINE>
    src, dst = read('f32[8] @ dp=2: S(0) -> R')
    print(plan(src, dst, Sent(), memory=1000))
    """
    if asked.by not in BYS:
        problem = "a price of your own cannot be written as a value"
        raise BadPlanOption("--code", f"--by {asked.by}", problem, "Ask for --by time, bytes or torch.")
    imports = ["from strategies.planner.text.parser import read", "from strategies.planner.search.api import plan"]
    arguments = ["src", "dst"]
    if asked.by == "torch":
        imports.append("from strategies.planner.steps.torch_price import TorchPrice")
        arguments.append("TorchPrice.of(src.mesh)")
    priced = [name for name, used in (("Sent", asked.by == "bytes"), ("Topology", asked.topology != TOPOLOGY)) if used]
    if asked.by == "bytes":
        arguments.append("Sent()")
    if asked.topology != TOPOLOGY:
        imports.insert(0, "from strategies.planner.steps.alpha_beta import Network")
        arguments.append(f"topology={asked.topology}")
    if priced:
        imports.append(f"from strategies.planner.steps.prices import {', '.join(priced)}")
    if asked.memory is not None:
        arguments.append(f"memory={asked.memory}")
    if asked.flattened:
        arguments.append(f"flattened={list(asked.flattened)}")
    call = f"print(plan({', '.join(arguments)}))"
    return "\n".join([*imports, "", f"src, dst = read({text_of(asked.src, asked.dst)!r})", call])
