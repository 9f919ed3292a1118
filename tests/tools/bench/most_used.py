"""The overloads that programs use most: which, in how many programs, and how often.  Writes strategies/ops/most_used.txt.

    python -m tests.tools.bench.most_used          # prints the list
    python -m tests.tools.bench.most_used --write  # and writes it

Small programs of the kinds that people train and serve run on a CPU under a dispatch mode that counts what reaches it
below autograd.  An overload counts that takes a tensor and gives or writes one: what only looks at a tensor is nothing
that could be sharded.  First come those that most programs use, of equals those that are called most.  What is left of
the 300 is filled up by the overloads for which DTensor has a rule and that most of torch's OpInfos reach.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.inputs import opinfo_samples
from strategies.ops.validation.coverage import MOST_USED
from strategies.torch_api import dtensor
from tests.tools.bench.most_used_programs import PROGRAMS


class Counting(TorchDispatchMode):
    """How often each overload is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if shardable(func):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


MOST = 300
"""The number of most used overloads."""


def shardable(op: torch._ops.OpOverload) -> bool:
    """Whether it takes a tensor and gives or writes one."""
    takes = any("Tensor" in str(a.type) for a in op._schema.arguments)
    gives = op._schema.is_mutable or any("Tensor" in str(r.type) for r in op._schema.returns)
    return op.namespace == "aten" and takes and gives


def used(program: Callable[[], None]) -> Counter[str]:
    """What one program calls; the same every time."""
    torch.manual_seed(0)
    with Counting() as mode:
        program()
    return mode.seen


def reached() -> Counter[str]:
    """How many OpInfos reach each overload that DTensor has a rule for, with samples of float32."""
    found: Counter[str] = Counter()
    for info in opinfo_samples.database():
        if torch.float32 in info.supported_dtypes("cpu"):
            met, _ = opinfo_samples.capture_calls(
                info, torch.float32, "even", device="cpu", seed=0, wanted=dtensor.registry_of
            )
            found.update({sample.op for sample in met if shardable(sample_op(sample.op))})
    return found


def sample_op(name: str) -> torch._ops.OpOverload:
    namespace, packet, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)


def table() -> list[tuple[str, int, int, int]]:
    """Overload, programs, calls, OpInfos: the first so many."""
    programs: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for program in PROGRAMS:
        seen = used(program)
        programs.update(seen.keys())
        calls.update(seen)
    infos = reached()
    names = programs.keys() | infos.keys()
    order = sorted(names, key=lambda op: (-programs[op], -calls[op], -infos[op], op))
    return [(op, programs[op], calls[op], infos[op]) for op in order[:MOST]]


def text(rows: list[tuple[str, int, int, int]]) -> str:
    head = [
        f"# The {len(rows)} overloads that programs use most, torch {torch.__version__.partition('+')[0]}.",
        "# Made by: python -m tests.tools.bench.most_used --write",
        f"# overload, programs of {len(PROGRAMS)} that call it, calls, OpInfos that reach it",
    ]
    return "\n".join([*head, *(f"{op} {programs} {calls} {infos}" for op, programs, calls, infos in rows), ""])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    written = text(table())
    print(written, end="")
    if "--write" in sys.argv:
        MOST_USED.write_text(written)
