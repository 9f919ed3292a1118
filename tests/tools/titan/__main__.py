"""torchtitan's trainer on rank threads beside one device: `python -m tests.tools.titan [NAME ...]`.

It trains a tiny Llama 3 two steps (`train.py` beside this file), once on one device and once on each mesh below, by `lt.compare`
for scripts, and prints how many values were compared and what differs.  It runs in an environment of its own, since torchtitan
needs torch 2.14 or newer for its default backend, and its own version of spmd_types:

    python -m venv titan && titan/bin/pip install "torch>=2.14" torchtitan triton . && titan/bin/python -m tests.tools.titan
"""

import argparse
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

SCRIPT = Path(__file__).with_name("train.py")
CASES = {
    "spmd_types, dp 2, tp 2, types checked": (
        4,
        {"dp": 2, "tp": 2},
        "--shard 2 --tp 2 --backend spmd_types --typecheck",
    ),
    "spmd_types, dp 2, tp 2": (4, {"dp": 2, "tp": 2}, "--shard 2 --tp 2 --backend spmd_types"),
    "spmd_types, replicas 2, dp 2, tp 2": (
        8,
        {"dp_replicate": 2, "dp": 2, "tp": 2},
        "--replicate 2 --shard 2 --tp 2 --backend spmd_types",
    ),
    "full_dtensor, dp 2, tp 2": (4, {"dp": 2, "tp": 2}, "--shard 2 --tp 2 --backend full_dtensor"),
    "full_dtensor, replicas 2, dp 2, tp 2": (
        8,
        {"dp_replicate": 2, "dp": 2, "tp": 2},
        "--replicate 2 --shard 2 --tp 2 --backend full_dtensor",
    ),
    "partial_dtensor, dp 2, tp 2": (4, {"dp": 2, "tp": 2}, "--shard 2 --tp 2 --backend partial_dtensor"),
    "partial_dtensor, pp 2, dp 2": (4, {"pp": 2, "dp": 2}, "--pp 2 --shard 2 --backend partial_dtensor"),
    "spmd_types, cp 2": (2, {"cp": 2}, "--cp 2 --backend spmd_types"),
}
"""Ranks, the axes of the mesh, and arguments of the script."""


def compared(name: str) -> str:
    """What the comparison of one case says, in one line."""
    ranks, mesh, args = CASES[name]
    backend = args.partition("--backend ")[2].split()[0]
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    command = [
        sys.executable, "-m", "localtensor", "compare", f"{SCRIPT} -n {ranks} {args}", "-q",
        "--reference", f"{SCRIPT} -n 1 --backend {backend}", "--mesh", axes,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == 0:
        return next((line for line in lines if line.startswith("compared")), "equal")
    kept = [line for line in lines if line.startswith(("first at", "because", "localtensor compare:", "call"))]
    return "; ".join(kept or lines[-3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"cases; by default all: {'; '.join(CASES)}")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CASES]:
        parser.error(f"{unknown[0]!r} is no case; choose of {'; '.join(CASES)}")
    if util.find_spec("torchtitan") is None:
        parser.error(
            "torchtitan is not installed here; the first lines of --help say how to make an environment with it"
        )
    for name in given.names or CASES:
        start = time.perf_counter()
        print(f"{name}: {compared(name)} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
