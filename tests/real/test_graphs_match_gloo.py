"""The one graph of lockstep is that of each real rank, op for op: of make_fx, of AOTAutograd, of torch.compile."""

import pytest

import localtensor as lt
from tests.real.graph_programs import FUNCTIONS, graphs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # each process imports the compiler


def test_the_graph_of_all_ranks_is_that_of_each_rank_on_gloo():
    with lt.LocalTensorMode(2):
        mine = graphs()
    assert len(mine) >= 4 * len(FUNCTIONS)
    for rank, theirs in enumerate(lt.run(graphs, ranks=2, on="gloo", timeout=180.0)):
        assert mine.keys() == theirs.keys()
        for name, found in theirs.items():
            assert mine[name] == found, f"rank {rank}: {name}"
