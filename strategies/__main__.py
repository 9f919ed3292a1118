"""The command `localtensor`, also as `python -m strategies`; signals are handled from its first line on."""

from __future__ import annotations

import gc
import sys

from strategies.base import signals


def main() -> None:
    """The console script."""
    signals.install_handlers()
    # importing torch and OpInfo makes 400,000 objects that stay: at Python's 700 the collector takes a fifth of that time
    gc.set_threshold(10_000, 10, 10)
    try:
        from strategies.cli.app import main as run  # why here: this takes a while, and Ctrl-C may come meanwhile
    # no memory for a library, say; Python's own 1 means a wrong rule
    except (ImportError, MemoryError, OSError) as error:
        sys.stderr.write(
            f"localtensor cannot start: {type(error).__name__}: {error}; this says nothing about any rule.\n"
        )
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()
