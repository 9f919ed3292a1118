"""`localtensor run --explain-isolation`, and writes to what ranks share."""

import pytest
import torch.utils.data

from localtensor.runner.torchrun import TorchrunOptions, run_script

PROGRAM = """
import torch, torch.distributed as dist, torch.utils.data
dist.init_process_group("gloo")
import lt_library
def replacement(self):
    return iter([lt_library.RANK])
torch.nn.Linear.forward = lambda self, x: dist.get_rank()
dist.barrier()
assert torch.nn.Linear(1, 1)(None) == dist.get_rank() == lt_library.RANK
dist.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lt_library.py").write_text("import torch.distributed as dist\nRANK = dist.get_rank()\n")

    def run(text, **options):
        (tmp_path / "train.py").write_text(text)
        code = run_script(TorchrunOptions("train.py", ranks=2, timeout=60.0, **options))
        return code, capfd.readouterr().err

    return run


def test_it_lists_what_is_each_ranks_own_and_what_is_shared_and_why(run):
    code, printed = run(PROGRAM, explain_isolation=True)
    assert code == 0
    assert "isolation: each rank's own: lt_library\n" in printed
    assert "isolation: shared (part of torch): " in printed and "isolation: shared (standard library): " in printed
    assert "locale.setlocale" in printed
    assert "is now" not in printed  # what a rank replaces in torch.nn is its own


def test_nothing_is_printed_unless_it_is_requested(run):
    assert run(PROGRAM) == (0, "")


def test_a_method_of_torch_that_stays_replaced_for_all_ranks_is_reported(run):
    line = "torch.utils.data.DataLoader.__iter__ = replacement\n"
    try:
        code, printed = run(PROGRAM.replace("dist.barrier()\n", line + "dist.barrier()\n"))
    finally:
        torch.utils.data.DataLoader.__iter__ = ITERATE
    assert code == 0
    assert "DataLoader.__iter__ is now replacement (" in printed and "train.py:5), on all ranks" in printed


ITERATE = torch.utils.data.DataLoader.__iter__
