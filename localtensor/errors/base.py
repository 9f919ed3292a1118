"""What all refusals share: one class each, built from the facts of the case.

A message has five parts: whose call, which argument, the values in short form, what does not
fit, what to do.  `refusal` puts them in that order, so that no class can forget one.
"""

from typing import Any


class LocalTensorError(Exception):
    """Base of all errors that this project raises on purpose.

    Not a `TypeError` or `ValueError`: operator dispatch and pytest's own machinery catch those.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """It can be pickled, whatever the arguments of its class: it crosses processes as text and attributes."""
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[LocalTensorError], args: tuple[object, ...], attributes: dict[str, object]) -> LocalTensorError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def refusal(call: str, argument: str, values: str, problem: str, remedy: str) -> str:
    """One sentence of five parts.

    >>> refusal("split", "dim", "dim=2 of (4, 4)", "there is no dim 2", "Use 0 or 1.")
    'split: dim: dim=2 of (4, 4): there is no dim 2. Use 0 or 1.'
    """
    return f"{call}: {argument}: {values}: {problem}. {remedy}"
