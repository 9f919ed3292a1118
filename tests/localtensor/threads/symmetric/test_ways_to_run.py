"""Symmetric memory under pytest's marks and under `localtensor run`."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from localtensor.runner.torchrun import TorchrunOptions, run_script

SCRIPT = """
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
dist.init_process_group("gloo")
data = symm_mem.empty(4, device="cpu").fill_(dist.get_rank())
handle = symm_mem.rendezvous(data, dist.group.WORLD)
handle.barrier()
peer = handle.get_buffer((handle.rank + 1) % handle.world_size, (4,), torch.float32)
print("total", torch.ops.symm_mem.one_shot_all_reduce(data, "sum", dist.group.WORLD.group_name).tolist())
{last}
dist.destroy_process_group()
"""


@pytest.mark.ranks(3, schedules=5)
def test_a_marked_test_shares_memory():
    data = symm_mem.empty(2, device="cpu").fill_(dist.get_rank())
    handle = symm_mem.rendezvous(data, dist.group.WORLD)
    handle.barrier()
    assert handle.get_buffer(2, (2,), torch.float32).tolist() == [2, 2]


def outcome(tmp_path, capfd, last, **options):
    """The exit code and the output of the script on two ranks."""
    script = tmp_path / "share.py"
    script.write_text(SCRIPT.format(last=last))
    code = run_script(TorchrunOptions(str(script), ranks=2, timeout=60.0, **options))
    return code, *capfd.readouterr()


def test_a_script_shares_memory(tmp_path, capfd):
    code, out, _ = outcome(tmp_path, capfd, "handle.barrier()")
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 0] total [1.0, 1.0, 1.0, 1.0]", "[rank 1] total [1.0, 1.0, 1.0, 1.0]"]


@pytest.mark.parametrize("schedule", [None, "shuffled:4"])
def test_a_race_of_a_script_is_reported_with_both_lines_and_its_schedule(schedule, tmp_path, capfd):
    code, _, err = outcome(tmp_path, capfd, "peer.add_(1) if handle.rank else data.sum()", schedule=schedule)
    assert code == 1
    assert err.count("share.py:10 in <module>") == 2
    assert "nothing orders the two" in err
    assert ("shuffled:4" in err) == (schedule is not None)
