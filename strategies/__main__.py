"""The command `localtensor`, also as `python -m strategies`; signals are handled from its first line on."""

from __future__ import annotations

import functools
import gc
import os
import sys

from strategies.base import signals


def main() -> None:
    """The console script."""
    signals.install_handlers()
    # Importing torch and OpInfo makes 400,000 objects that stay.  Workers, and a script under `run`, keep Python's threshold.
    if sys.argv[1:2] != ["run"] and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(gc.set_threshold, *gc.get_threshold()))
        gc.set_threshold(10_000, 10, 10)
    try:
        from strategies.cli.app import main as run  # why here: this takes a while, and Ctrl-C may come meanwhile
    except (ImportError, MemoryError, OSError) as error:  # no memory for a library, say; Python's 1 means a wrong rule
        sys.stderr.write(
            f"localtensor cannot start: {type(error).__name__}: {error}; this says nothing about any rule.\n"
        )
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()
