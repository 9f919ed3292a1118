"""What a propagator refuses: calls that it cannot answer, and rules that say what cannot be."""

from __future__ import annotations

from localtensor.errors.base import LocalTensorError, refusal


class BadCall(LocalTensorError):
    """Specs or arguments that are no call of the op on one mesh."""

    def __init__(self, op: str, argument: str, values: str, problem: str, remedy: str) -> None:
        super().__init__(refusal(f"propagate {op}", argument, values, problem, remedy))


class NoRule(LocalTensorError):
    """Nothing says how this op may be sharded; the message lists what was tried."""

    def __init__(self, op: str, specs: str, tried: str, remedy: str) -> None:
        super().__init__(refusal(f"propagate {op}", "op", specs, f"there is no rule for it; tried: {tried}", remedy))


class BadRule(LocalTensorError):
    """A rule that says nonsense; `where` is its file and line."""

    def __init__(self, op: str, where: str, values: str, problem: str, remedy: str) -> None:
        self.where = where
        super().__init__(refusal(f"rule of {op} at {where}", "line", values, problem, remedy))


class WouldMoveWritten(LocalTensorError):
    """The call writes to a tensor that would have to be redistributed first, so that its owner would not see it."""

    def __init__(self, op: str, argument: str, values: str, remedy: str) -> None:
        problem = "the op writes to it, so it stays where it lies, and no line of the rule leaves it there"
        super().__init__(refusal(f"propagate {op}", argument, values, problem, remedy))


class NoMetadata(LocalTensorError):
    """The shapes of the results cannot be known before the op runs."""

    def __init__(self, op: str, values: str, problem: str, remedy: str) -> None:
        super().__init__(refusal(f"propagate {op}", "outputs", values, problem, remedy))
