"""The scripts that run torch's own propagator under free-running threads.  Each is one file of plain torch.

What is run is what is handed out: the script that repeats a finding is the one that made it.  torch's private parts that
they touch (each tried on 2.13.0):
    `DTensor._op_dispatcher.sharding_propagator`   the propagator itself, and its cache's `cache_info`
    `_redistribute._gen_transform_infos`, `clear_redistribute_planner_cache`, `use_min_cost_redistribution_plan`
    `debug._clear_sharding_prop_cache`, `_dtensor_spec`, `_op_schema`, `_ops.single_dim_strategy`
    `DeviceMesh(..., _init_backend=False, _rank=r)`   a rank's view of a mesh without a process group
    `torch.testing._internal.distributed.multi_threaded_pg`   torch's own rank threads
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

SCRIPTS: Mapping[str, str] = MappingProxyType({
    "numbers": "does a redistribution on rank threads keep the numbers?",
    "plans": "is each rank thread given its own plan for a redistribution?",
    "ranks": "is a thread that serves a second rank given the first one's answer?",
    "keys": "are two calls that differ in an argument told apart?",
    "flags": "does a setting of one thread stay its own, and end when it ends?",
    "clear": "does every thread learn that the caches were cleared?",
    "answers": "do many threads of one rank get what one thread gets?",
})  # fmt: skip
"""Each script, and what it asks; what costs most to overlook is first."""
_FOLDER = Path(__file__).parents[2] / "templates"


def script(name: str, *, threads: int, rounds: int, seed: int, seconds: int) -> str:
    """The whole file; `seconds` is when it gives up.

    >>> script("clear", threads=8, rounds=1, seed=0, seconds=60).splitlines()[0]
    '# A rule is replaced, and the caches are cleared: does every thread learn of it?'
    """
    body = (_FOLDER / f"races_{name}.txt").read_text(encoding="utf-8")
    first, rest = body.split("\n", 1)
    head = (
        f"{first}\n# Plain torch: run it with `python races_{name}.py`; exit code 1 if it finds something.\n"
        f"THREADS, ROUNDS, SEED, SECONDS = {threads}, {rounds}, {seed}, {seconds}\n"
    )
    return head + (_FOLDER / "races_common.txt").read_text(encoding="utf-8") + rest
