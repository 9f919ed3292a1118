"""The command line `localtensor`, run and timed inside one process: `python -m tests.tools.bench.ours validate add`.

Prints one line of JSON.  Everything that it imports is imported before the clock starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main(words: list[str]) -> None:
    """Run the command with these arguments, and tell how long it took and what it tried."""
    import strategies.cli.commands.validate  # the work, which cli imports late
    import strategies.inputs.opinfo_samples
    from strategies.cli import app as cli

    strategies.inputs.opinfo_samples.database()
    _parse_once(cli)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        sys.argv = ["localtensor", *words, "--quiet", "--json", str(report)]
        start, busy = time.perf_counter(), cpu()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            cli.main()
        seconds, busy = time.perf_counter() - start, cpu() - busy
        told = json.loads(report.read_text())
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu": busy,
                **told["counts"],
                "mesh_sizes": len(told["ranks"]),
                "phases": told["seconds"],
            }
        )
    )


def _parse_once(cli: Any) -> None:
    """typer imports half of itself (and pydantic) when it first reads a command line: that is start-up, too."""
    sys.argv = ["localtensor", "validate", "--ranks", "1", "none", "--quiet"]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main()


def cpu() -> float:
    """Processor seconds of this process and of those that it started and that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


if __name__ == "__main__":
    main(sys.argv[1:])
