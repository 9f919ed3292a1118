"""One rank of one check, run as a script: exit code 0 if DTensor gives what plain torch gives, 1 if not, 3 if plain torch refuses.

An exception of DTensor is not caught: its traceback is the answer.  The environment says which check (`BY_HAND`) and which rank.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).parents[3]
SECONDS, REFUSED_BY_PLAIN_TORCH = 15, 3
"""What a check may take of one processor, and twenty times that of the clock; an exit code."""


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.tools.by_hand.tables import CHECKS
    from tests.tools.by_hand.words import Given, difference, leaves

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # a check that never returns ends by it
    signal.alarm(20 * SECONDS)  # and one whose ranks wait for each other
    check = CHECKS[os.environ["BY_HAND"]]
    torch.manual_seed(0)
    try:
        wants = leaves(check.program(Given(None)))
    except Exception:  # why: any of them says that the check is no check
        traceback.print_exc()
        return REFUSED_BY_PLAIN_TORCH
    dist.init_process_group("gloo", timeout=timedelta(seconds=20 * SECONDS))
    torch.manual_seed(0)
    gots = leaves(check.program(Given(init_device_mesh("cpu", check.mesh))))
    wrong = [f"{len(gots)} results, not {len(wants)}"] if len(gots) != len(wants) else []
    for number, (got, want) in enumerate(zip(gots, wants, strict=False)):
        if said := difference(got, want.detach() if isinstance(want, torch.Tensor) else want):
            wrong.append(f"rank {dist.get_rank()}: result {number} {said}")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
