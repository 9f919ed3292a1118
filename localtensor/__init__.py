"""Tests distributed PyTorch without a cluster: every rank simulated in one process, every sharding rule tested.

run, LocalTensorMode        run a program on ranks: rank threads or real processes; all ranks in one control flow
all_reduce, ...             collectives on the tensors of that mode
round_robin, replay, ...    schedules: which rank runs next
Mesh, Spec, split, ...      layouts as arithmetic on shapes
check_graphs, graph_cost    the collectives of the graphs that ranks compile
testing                     helpers for tests: comparisons, Hypothesis strategies, checks of sharding rules
plan, overlay_dtensor, ...  redistribution, and sharding rules inside the running DTensor: from the package `strategies`

Each name is imported on first use, so that `import localtensor` is quick.
"""

from localtensor._util import lazy as _lazy

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)
