"""Rank programs from ordinary tests: the fixture `world`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from localtensor.pytest_plugin.marks import RANKS, Settings

if TYPE_CHECKING:
    from localtensor._util.events import Call
    from localtensor.runner.api import Run

__tracebackhide__ = True  # a failure is shown at the line that called `world.run`


class World:
    """Runs functions on ranks, with the session's options as defaults."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._log: Sequence[Call] | str = "world.run was not called yet"

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, **overrides: Any) -> "Run":
        """Every rank has run `fn(*args)`: `localtensor.run` on `ranks` ranks, else on those of `--ranks`, else on 2.

        `overrides` are keywords of `localtensor.run`: on, schedule, seed, timeout, device, leftovers, share.  Raises
        what that raises.
        """
        from localtensor.errors.base import LocalTensorError
        from localtensor.pytest_plugin.outcomes import trimmed
        from localtensor.runner import api as _run

        said = self._settings
        options: dict[str, Any] = {"on": said.on, "schedule": said.schedule, "seed": said.seed or 0}
        options["leftovers"] = said.leftovers or "ignore"
        if said.timeout is not None:
            options["timeout"] = said.timeout or None
        options.update(overrides)
        self._log = "the run has not ended"
        try:
            run = _run.run(fn, *args, ranks=said.ranks or RANKS if ranks is None else ranks, **options)
        except LocalTensorError as fault:
            self._log = getattr(fault, "log", ())
            if fault.__cause__ is not None:
                trimmed(fault.__cause__)
            raise trimmed(fault) from fault.__cause__
        self._log = run.calls if options["on"] == "threads" else "real processes keep no event log"
        return run

    @property
    def calls(self) -> "Sequence[Call]":
        """What the ranks of the last run called."""
        if isinstance(self._log, str):
            pytest.fail(f"comms: {self._log}. Read it after a world.run on rank threads.", pytrace=False)
        return self._log
