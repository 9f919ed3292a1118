"""The end of a command that cannot do its work: one sentence on standard error, and an exit code."""

from __future__ import annotations

from strategies.base.signals import complain


def fail(sentence: str, code: int) -> int:
    """Print the sentence on standard error.  Returns the exit code."""
    complain(sentence)
    return code
