"""The command `localtensor`, also as `python -m strategies`; signals are handled from its first line on."""

from __future__ import annotations

import sys

from strategies.base import signals


def main() -> None:
    """The console script."""
    signals.install_handlers()
    try:
        from strategies.cli.app import main as run  # why here: this takes a while, and Ctrl-C may come meanwhile
    except (
        ImportError,
        MemoryError,
        OSError,
    ) as error:  # no memory for a library, say; Python's own 1 means a wrong rule
        sys.stderr.write(
            f"localtensor cannot start: {type(error).__name__}: {error}; this says nothing about any rule.\n"
        )
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()
