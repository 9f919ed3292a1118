"""How the laws run the rank programs that `localtensor.testing` draws, with a fault in them or without."""

from typing import Any

import localtensor as lt
from tests.properties.programs.program import RankProgram


def simulated(program: RankProgram, schedule: Any = None, timeout: float = 20.0) -> lt.Run:
    """What lt.run makes of the program: of each rank its accumulator, and what it got from each step."""
    return lt.run(program, ranks=program.ranks, schedule=schedule, timeout=timeout, leftovers="ignore")
