"""What the two lines for authors of rules raise: a rule that is wrong, one that is none, and one that nothing tests."""

from __future__ import annotations

from typing import Any

from localtensor.errors.base import LocalTensorError, refusal


class NotARule(LocalTensorError):
    """A rule, an op or a setting that cannot be read, or a rule that does not fit the op's calls."""

    def __init__(self, call: str, argument: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(refusal(call, argument, str(value), problem, remedy))


class NothingTested(LocalTensorError):
    """No call came to the point of being judged, and that is no pass."""

    def __init__(self, call: str, what: str, why: str, remedy: str) -> None:
        super().__init__(refusal(call, "calls", what, f"nothing was tested: {why}", remedy))


class WrongRule(AssertionError):
    """The claim is wrong, and here is the smallest case found.

    `script` is a program of plain torch that shows it, `example` a decorator for a test with `rule_cases`, `repeat`
    the call that judges this case alone, `case` the case itself.
    """

    def __init__(self, message: str, *, case: Any, script: str, example: str, repeat: str) -> None:
        super().__init__(message)
        self.case, self.script, self.example, self.repeat = case, script, example, repeat
