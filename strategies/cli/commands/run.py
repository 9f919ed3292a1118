"""`localtensor run`: what it passes on to the runner, and the planner's word on redistributions of a recorded run."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Any

from localtensor.errors import LocalTensorError
from localtensor.runner.torchrun import TorchrunOptions, run_script
from strategies.base import signals
from strategies.cli.options import RunOptions, fail

MOST_SECONDS = 86400.0
"""Of a limit: a day, as for the run itself."""


def run(options: RunOptions) -> int:
    """The exit code of the script's first rank that failed; 2 for invalid options."""
    given: dict[str, Any] = asdict(options)
    if options.topology is not None:
        from strategies.planner.steps.topology import parse_topology  # lazy: it needs torch

        try:
            given["topology"] = parse_topology(options.topology)
        except LocalTensorError as refused:
            return fail(str(refused), signals.EXIT_USAGE)
    if options.html is not None:
        given["planned"] = planned
    given |= {"ranks": 1} if options.ranks is None else {}
    end = time.monotonic() + options.timeout
    with signals.interruptible():  # Ctrl-C stops the user's program
        code = run_script(TorchrunOptions(**given, note=note(options)))
    # It is the limit of the whole run: Python waits for threads and processes that the script leaves behind.
    if options.timeout > 0:
        left = min(max(end - time.monotonic(), signals.EXIT_SECONDS), MOST_SECONDS)
        signals.limit_leaving(code or signals.EXIT_WRONG, "the script", left)
    return code


_OURS = re.compile(r"--(on|html|summary|faults|explain-isolation)(=.*)?", re.DOTALL)
_HOW_MANY = re.compile(r"-n\d*|--ranks(=.*)?", re.DOTALL)


def note(options: RunOptions) -> str:
    """What is said before the script begins: that it has one rank, and which options stand after it.

    Options after the script are the script's own, whatever their names.  Only those are named here that scripts seldom
    have; the number of ranks only if it is not given before the script, too.
    """
    begin = "localtensor run: "
    after = [
        word.partition("=")[0]
        for word in options.arguments
        if _OURS.fullmatch(word) or (options.ranks is None and _HOW_MANY.fullmatch(word))
    ]
    lines = [begin + "this runs 1 rank; -n 4 runs 4."] if options.ranks is None else []
    if after:
        words = ", ".join(dict.fromkeys(after))
        lines.append(
            f"{begin}{words} after {options.name} goes to the script: options of this command stand before it."
        )
    return "\n".join(lines)


def planned(text: str) -> str:
    """The cheapest steps for a redistribution in the syntax of `localtensor plan`; why not, where it has none.

    >>> planned("f32[8,4] @ dp=2,tp=2: S(0),R -> R,R")
    'dp: all-gather S(0) -> R  64 B  5.01 us'
    """
    from strategies.planner.search.api import plan  # lazy: it needs torch
    from strategies.planner.text.parser import read

    try:
        found = plan(*read(text))
    except LocalTensorError as refused:
        return str(refused)
    return "; ".join(map(str, found.steps)) or "nothing moves"
