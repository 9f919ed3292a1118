"""localtensor.suites_ranks: how long a test of somebody else's may take."""

from torch.testing._internal import common_distributed

from localtensor.suites_ranks import TIMEOUT, limit_said


def test_a_test_has_as_long_on_rank_threads_as_torch_gives_its_processes():
    assert common_distributed.TIMEOUT_DEFAULT <= TIMEOUT


def test_the_environment_says_it_before_anybody_else(monkeypatch):
    monkeypatch.delenv("LOCALTENSOR_TIMEOUT", raising=False)
    assert (limit_said(7.0), limit_said(0.0)) == (7.0, None)
    monkeypatch.setenv("LOCALTENSOR_TIMEOUT", "9")
    assert limit_said(7.0) == 9.0
