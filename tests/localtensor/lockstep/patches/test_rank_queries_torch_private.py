import re
from pathlib import Path

import pytest

from localtensor.lockstep.patches.rank_queries import PRIVATE
from localtensor.threads import rank_world
from localtensor.threads.state import propagation_settings, shared_propagation
from tests.localtensor.threads.test_rank_world import lacks

ROOMS = Path(__file__).parents[4] / "localtensor"
TOUCHED = re.compile(r"\btorch\._C\.(_\w+)|\b_functorch\.(_\w+)|\bcpp\.(_\w+)")
ELSEWHERE = {"_distributed_c10d", "_functorch"}  # modules, whose own parts are listed


@pytest.mark.parametrize("path", PRIVATE)
def test_each_private_part_of_torch_is_there(path):
    assert lacks(path) is None, PRIVATE[path]


def touched():
    """The private names of torch's C++ in each room, by name, with the rooms."""
    found = {}
    for room in ROOMS.rglob("*.py"):
        for match in TOUCHED.finditer(room.read_text()):
            name = next(part for part in match.groups() if part)
            found.setdefault(name, set()).add(room.stem)
    return found


def test_what_is_touched_is_listed_somewhere():
    listed = {
        part
        for table in (
            PRIVATE,
            rank_world.PRIVATE,
            rank_world.PROCESS_GLOBALS_PRIVATE,
            shared_propagation.PRIVATE,
            propagation_settings.PRIVATE,
        )
        for part in table
    }
    last = {part for path in listed for part in path.split(".")} | ELSEWHERE
    assert {name: rooms for name, rooms in touched().items() if name not in last} == {}
