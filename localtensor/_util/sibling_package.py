"""The package `strategies`, which is installed beside `localtensor`: found also where a user has a folder of that name."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

NAME = "strategies"
_ROOT = Path(__file__).parents[2]
_FILE = str(_ROOT / NAME / "__init__.py")


def ensure_importable() -> None:
    """Put the folder of our packages first on `sys.path` where another `strategies` would be imported instead of ours.

    Child processes inherit the path, so they import the same package.  Raises ImportError if this process has imported
    another package of that name already: one process cannot have both.
    """
    loaded = sys.modules.get(NAME)
    if loaded is not None and not _is_ours(loaded.__file__):
        place = loaded.__file__ or ", ".join(loaded.__path__)
        raise ImportError(
            f"localtensor needs its own package {NAME!r} ({_FILE}), but this process has imported another package of that "
            f"name: {place}. Rename that package, or use localtensor in a process that does not import it."
        )
    found = PathFinder.find_spec(NAME)
    if found is not None and not _is_ours(found.origin):
        sys.path.insert(0, str(_ROOT))


def _is_ours(file: str | None) -> bool:
    """Whether this is the file of our package; None is a folder without an `__init__.py`."""
    return file is not None and os.path.realpath(file) == os.path.realpath(_FILE)
