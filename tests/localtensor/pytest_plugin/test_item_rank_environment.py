import os

from localtensor.pytest_plugin.item import EnvironmentSnapshots


def test_what_one_rank_had_does_not_stay(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    around = EnvironmentSnapshots()
    around.take_snapshot()
    os.environ.update(RANK="3", MASTER_PORT="29500")
    around.restore()
    assert "RANK" not in os.environ and os.environ["MASTER_PORT"] == "1"


def test_what_fixtures_set_and_put_back_stays(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    around = EnvironmentSnapshots()
    monkeypatch.setenv("MASTER_PORT", "2")  # a fixture of the module
    around.take_snapshot()
    around.restore()
    assert os.environ["MASTER_PORT"] == "2"
    monkeypatch.setenv("MASTER_PORT", "1")  # put back
    around.restore()
    assert os.environ["MASTER_PORT"] == "1"
