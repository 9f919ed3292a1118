"""The memory of a graph, and the bytes that its collectives have in flight, node by node; and two graphs beside each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rich.console import Console
from rich.table import Table
from torch import fx

from localtensor.errors.base import WrongType
from localtensor.testing.graph_flow import Flow, Start, Storage, sizes_of, tensors_of

_CALL = "graph_cost"


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What is there while a node runs: bytes of memory, bytes in flight, and the number of collectives in flight."""

    name: str
    memory: int
    in_flight: int
    collectives: int


@dataclass(frozen=True, slots=True)
class GraphCost:
    """The cost of a graph by node, in its order; `between` counts the nodes between a collective and its wait, by its name."""

    nodes: tuple[NodeCost, ...]
    between: Mapping[str, int]

    @property
    def peak_memory(self) -> NodeCost:
        """The first node at which most memory is there."""
        return max(self.nodes, key=lambda node: node.memory)

    @property
    def peak_in_flight(self) -> NodeCost:
        """The first node at which most bytes are in flight."""
        return max(self.nodes, key=lambda node: node.in_flight)

    @property
    def most_collectives(self) -> int:
        """The most collectives that are in flight at once."""
        return max(node.collectives for node in self.nodes)


def graph_cost(graph: fx.GraphModule) -> GraphCost:
    """Bytes of memory and bytes in flight of a `torch.fx.GraphModule`, at each node in its order.

    A tensor is there from the node that makes it to its last use; inputs, attributes and what is returned stay, and so
    does what a collective reads, until its wait.  In flight is what a rank brings to collectives that have started and
    not been waited for.  A view is the storage that it is of.  A symbolic size counts as the example that was traced.
    Raises `NotCheckable` for communication that cannot be followed, as `check_graphs` does.
    """
    if not isinstance(graph, fx.GraphModule):
        raise WrongType(_CALL, "graph", graph, "a torch.fx.GraphModule is expected", "Pass what make_fx returns.")
    flow = Flow(graph.graph, _CALL)
    open_by_node = [dict(flow.reading) for _ in flow.run()]
    nodes = list(graph.graph.nodes)
    sizes, first, last = _lives(flow, nodes, open_by_node)
    found = []
    for at, node in enumerate(nodes):
        memory = sum(size for storage, size in sizes.items() if first[storage] <= at <= last[storage])
        flying = [_payload(start) for start in open_by_node[at]]
        found.append(NodeCost(node.name, memory, sum(flying), len(flying)))
    return GraphCost(tuple(found), _between(flow, nodes))


def print_graph_costs(before: fx.GraphModule, after: fx.GraphModule, *, console: Console | None = None) -> None:
    """Print a table of two graphs, before and after a pass: the peaks of memory and of bytes in flight, each with its node.

    The last rows have, for each collective, the nodes between its start and its wait, in which it can be hidden.
    Raises as `graph_cost` does.
    """
    costs = [graph_cost(before), graph_cost(after)]
    table = Table("", "before", "after")
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    memory, flying = [cost.peak_memory for cost in costs], [cost.peak_in_flight for cost in costs]
    table.add_row("memory, peak bytes", *(f"{peak.memory:,}" for peak in memory))
    table.add_row("  at node", *(peak.name for peak in memory))
    table.add_row("in flight, peak bytes", *(f"{peak.in_flight:,}" for peak in flying))
    table.add_row("  at node", *(peak.name if peak.in_flight else "-" for peak in flying))
    table.add_row("  collectives at once", *(str(cost.most_collectives) for cost in costs))
    table.add_row("nodes before the wait of", "", "")
    for name in dict.fromkeys([*costs[0].between, *costs[1].between]):
        table.add_row(name, *(str(cost.between.get(name, "-")) for cost in costs))
    (console or Console()).print(table)


def _lives(
    flow: Flow, nodes: list[fx.Node], open_by_node: list[dict[Start, frozenset[Storage]]]
) -> tuple[dict[Storage, int], dict[Storage, int], dict[Storage, int]]:
    """The bytes of each storage, and the first and the last node at which it is there."""
    sizes: dict[Storage, int] = {}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    end = len(nodes) - 1
    for at, node in enumerate(nodes):
        for storage, size in _made(flow, node).items():
            sizes.setdefault(storage, size)
            kept = node.op in ("placeholder", "get_attr")
            first.setdefault(storage, 0 if kept else at)
            last[storage] = end if kept else at
        used = [flow.storages[one] for one in node.all_input_nodes]
        for storage in frozenset[Storage]().union(*used, *open_by_node[at].values(), flow.storages[node]):
            last[storage] = max(at, last.get(storage, at))
    return sizes, first, last


def _made(flow: Flow, node: fx.Node) -> dict[Storage, int]:
    """The bytes of the storages that a node makes, which are those that bear its name."""
    own = flow.storages[node]
    tensors = tensors_of(node)
    sizes = [tensor.dtype.itemsize * prod(sizes_of(tensor, node, _CALL)) for tensor in tensors]
    if node.op == "get_attr":
        return dict.fromkeys(own, sum(sizes))
    if own == frozenset([node]) and len(tensors) < 2:
        return {node: sum(sizes)}
    return {(node, i): size for i, size in enumerate(sizes) if own == frozenset([node]) or (node, i) in own}


def _payload(start: Start) -> int:
    return sum(dtype.itemsize * prod(shape) for dtype, shape in start.tensors)


def _between(flow: Flow, nodes: list[fx.Node]) -> dict[str, int]:
    position = {node: at for at, node in enumerate(nodes)}
    ends = {start: position[step.node] for step in flow.steps for start in step.waits}
    return {start.node.name: max(0, end - position[start.node] - 1) for start, end in ends.items()}
