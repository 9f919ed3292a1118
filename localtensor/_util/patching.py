"""An attribute of somebody else's module or class, replaced for a while."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While inside, `owner.name` is `value`; afterwards what it was, or nothing if it was not the owner's own.

    >>> from types import SimpleNamespace
    >>> box = SimpleNamespace(x=1)
    >>> with replaced(box, "x", 2), replaced(box, "y", 3):
    ...     box
    namespace(x=2, y=3)
    >>> box
    namespace(x=1)
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """While inside, who calls `owner.name(...)` calls `around(what it was, ...)`; functions and methods alike."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return replaced(owner, name, ours)
