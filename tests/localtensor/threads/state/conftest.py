import pytest

from localtensor.threads.state.swap import OutsideState, RankState, switch


@pytest.fixture
def ranks():
    """Two ranks, the first of them running."""
    with OutsideState():
        states = [RankState(rank, 2, seed=5) for rank in range(2)]
        switch(None, states[0])
        yield states
