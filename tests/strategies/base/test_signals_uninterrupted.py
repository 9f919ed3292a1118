"""strategies.base.signals: one thread and no noise inside, and what was before afterwards, whatever happens inside."""

import logging
import warnings

import pytest
import torch

from strategies.base.signals import quiet_on_one_thread

LOG = logging.getLogger("tests.undisturbed")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def now():
    return torch.get_num_threads(), logging.root.manager.disable, list(warnings.filters)


def test_inside_it_is_quiet_on_one_thread_and_afterwards_as_it_was(three_threads, caplog):
    before = now()
    with quiet_on_one_thread():
        warnings.warn("nobody hears it", UserWarning, stacklevel=1)  # an error in our tests
        LOG.warning("nor that")
        LOG.error("but that")
        assert torch.get_num_threads() == 1
    assert now() == before and caplog.messages == ["but that"]


def test_a_command_that_raises_gives_it_back_too(three_threads):
    @quiet_on_one_thread()
    def command():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError

    before = now()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            command()
        assert now() == before


def test_what_was_silent_before_stays_so():
    with quiet_on_one_thread():
        inner = now()
        with quiet_on_one_thread():
            pass
        assert now() == inner
