"""torch's own validator, run and timed inside one process: `python -m tests.tools.bench.peer --op add --device cpu`.

Prints one line of JSON.  Everything that it imports is imported before the clock starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
import time
import warnings

from tests.tools.bench.ours import cpu

VALIDATOR = "torch.distributed.tensor._ops.strategy_validation"


def main(words: list[str]) -> None:
    """Run its main program with these arguments, and tell how long it took and what it tried."""
    warnings.simplefilter("ignore")
    runpy.run_module(VALIDATOR, run_name="warm")  # its imports; the program itself stands under __main__
    sys.argv = [VALIDATOR, *words]
    said = io.StringIO()
    start, busy = time.perf_counter(), cpu()
    with contextlib.redirect_stdout(said):
        runpy.run_module(VALIDATOR, run_name="__main__")
    seconds, busy = time.perf_counter() - start, cpu() - busy
    tried = re.findall(r"Samples: (\d+).*?Combinations: (\d+)", said.getvalue())
    samples, combinations = (sum(int(pair[i]) for pair in tried) for i in (0, 1))
    print(json.dumps({"seconds": seconds, "cpu": busy, "samples": samples, "combinations": combinations}))


if __name__ == "__main__":
    main(sys.argv[1:])
