import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory

import localtensor as lt
from localtensor.threads.symmetric.handle import CPP
from localtensor.threads.symmetric.patches import SYMMETRIC_PRIVATE
from tests.end_to_end.test_docs import ROOT
from tests.tools.symmetric.late_signal import late_signal
from tests.tools.symmetric.time_line import draw, race_of


@pytest.mark.parametrize("path", SYMMETRIC_PRIVATE)
def test_the_private_parts_of_torch_are_there(path):
    found = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    assert found is not None, SYMMETRIC_PRIVATE[path]


def test_everything_is_torchs_own_again_after_a_run():
    names = ("Stream", "Event", "current_stream", "current_device", "_sleep")
    before = {name: getattr(torch.cuda, name) for name in names}
    constants, nccl, size = dict(vars(CPP)), dist.is_nccl_available, CPP.signal_pad_size

    def program():
        CPP.signal_pad_size = 4096
        return torch.cuda.Stream is not before["Stream"] or torch.cuda.is_available()

    assert lt.run(program, ranks=2).values == (True, True)
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert {**vars(CPP)} == constants
    assert (dist.is_nccl_available, CPP.signal_pad_size) == (nccl, size)


def test_the_answers_for_torchs_modules_are_not_for_programs():
    def program():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.cuda.current_device()
        return dist.is_nccl_available()

    if not torch.cuda.is_available():
        assert lt.run(program, ranks=1).values == (dist.is_nccl_available(),)


def test_ops_of_handles_have_the_overloads_that_torchs_compiler_lists():
    def program():
        packets = [getattr(torch.ops.symm_mem, name) for name in ("_barrier", "_rendezvous", "nccl_put_signal")]
        return [(packet.overloads(), packet.default._schema.name) for packet in packets]

    assert lt.run(program, ranks=1).values[0] == program()


def test_the_size_of_a_signal_pad_is_that_of_the_allocation():
    def program():
        torch.distributed._symmetric_memory.set_signal_pad_size(64)
        mine = torch.distributed._symmetric_memory.empty(2, device="cpu")
        handle = torch.distributed._symmetric_memory.rendezvous(mine, dist.group.WORLD)
        return handle.signal_pad_size, handle.get_signal_pad(0).numel()

    assert lt.run(program, ranks=2).values == ((64, 16),) * 2


def test_the_picture_of_the_page_is_that_of_its_program():
    race = race_of(late_signal, 2)
    picture = draw(race, 2)
    assert picture == (ROOT / "docs/race.svg").read_text()
    assert {race.first.place.line, race.second.place.line} == {
        int(line) for line in re.findall(r"line (\d+) of rank", picture)
    }
    assert picture.count('class="access"') == 2
    page = (ROOT / "docs/symmetric_memory.md").read_text()
    assert str(race).splitlines()[1] in page


def test_a_picture_has_a_lane_for_each_rank():
    race = race_of(late_signal, 4)
    assert draw(race, 4).count('class="lane"') == 4
