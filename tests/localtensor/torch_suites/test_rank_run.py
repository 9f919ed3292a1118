"""localtensor.torch_suites.rank_run: how long a test of somebody else's may take."""

from torch.testing._internal import common_distributed

from localtensor.torch_suites.rank_run import TIMEOUT


def test_a_test_has_as_long_on_rank_threads_as_torch_gives_its_processes():
    assert common_distributed.TIMEOUT_DEFAULT <= TIMEOUT
