import pytest

from tests.device import here


@pytest.fixture(autouse=True)
def on_this_device():
    """What a test makes by itself lies on the device of the programs."""
    with here():
        yield
