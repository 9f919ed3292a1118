"""One graph of torch.fx as a rank runs it: which collectives it starts and waits for, and what it does with their buffers.

A node belongs to storages: a placeholder and the result of an op have one of their own, views and in-place results have that
of their argument.  Until its wait, a collective writes to the storage of its result, and reads those of its arguments.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from re import findall
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from localtensor import errors
from localtensor._util.events import Place, place_at
from localtensor.collectives.c10d_table import WAITS

Storage: TypeAlias = Any  # a node, (node, index) of one of its results, or the name of an attribute

_NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
KINDS = frozenset([*_NAMES, *(f"{name}_coalesced" for name in _NAMES), "all_to_all_single", "broadcast"])
_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
_COMMUNICATION = _FUNCTIONAL | {"c10d", "_dtensor", "symm_mem"}
_SIZES = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride", "dim", "numel"})
"""Ops that read no element."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A node that starts a collective; `tensors` are the dtype and shape of what a rank brings, `root` is within the group."""

    node: fx.Node
    kind: str
    group_name: str
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]
    device: torch.device | None
    op: str | None = None
    root: int | None = None
    group_size: int | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A node that starts a collective, or waits for some, or both."""

    node: fx.Node
    start: Start | None = None
    waits: tuple[Start, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """A node that reads, or writes to, a buffer of a collective that has not been waited for."""

    start: Start
    node: fx.Node
    writes: bool


@dataclass(slots=True)
class Flow:
    """What a graph does, in its order: `storages` by node, the first fault, and the collectives without a wait."""

    graph: fx.Graph
    call: str
    storages: dict[fx.Node, frozenset[Storage]] = field(default_factory=dict)
    items: dict[fx.Node, list[frozenset[Storage]]] = field(default_factory=dict)  # of nodes that return lists
    steps: list[Step] = field(default_factory=list)
    fault: Fault | None = None
    unwaited: tuple[Start, ...] = ()
    writing: dict[Storage, Start] = field(default_factory=dict)  # at the node that is being read
    reading: dict[Start, frozenset[Storage]] = field(default_factory=dict)

    def run(self) -> Iterator[fx.Node]:
        """Each node, once it has been followed."""
        for node in self.graph.nodes:
            self._follow(node)
            yield node
        self.unwaited = tuple(self.reading)

    def _follow(self, node: fx.Node) -> None:
        schema = _schema(node)
        space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
        if space in _FUNCTIONAL and name in WAITS:
            self._wait(node)
        elif space in _COMMUNICATION:
            self._start(node, space, name, schema)
        else:
            self._compute(node, name, schema)

    def _wait(self, node: fx.Node) -> None:
        self.storages[node] = mine = self._of(node.args or node.kwargs)
        brought, *_ = *node.args, *node.kwargs.values()
        if isinstance(brought, list | tuple):
            self.items[node] = [self._of(one) for one in brought]
        waits = tuple(dict.fromkeys(self.writing[one] for one in mine if one in self.writing))
        self._end(waits, mine)
        if waits:
            self.steps.append(Step(node, waits=waits))

    def _end(self, waits: Iterable[Start], storages: frozenset[Storage]) -> None:
        for one in storages:
            self.writing.pop(one, None)
        for start in waits:
            self.reading.pop(start, None)

    def _start(self, node: fx.Node, space: str, name: str, schema: Any) -> None:
        kind, at_once = name.removesuffix("_out").rstrip("_"), (space, name) == ("_dtensor", "shard_dim_alltoall")
        if not at_once and (space not in _FUNCTIONAL or kind not in KINDS):
            problem = "only functional collectives of all ranks of a group are followed"
            remedy = f"Leave it out of the graph, or use one of {', '.join(sorted(KINDS))}."
            raise errors.NotCheckable(self.call, "graph", f"{space}.{name} at {line_of(node)}", problem, remedy)
        named = _arguments(node, schema)
        written = named.get("out") if name.endswith("_out") else named.get("input", named.get("inputs"))
        in_place = name.endswith(("_", "_out"))
        brought = named.get("input", named.get("inputs"))
        self._use(node, self._of(brought), self._of(written) if in_place else frozenset())
        start = _start_of(node, self.call, "shard_dim_alltoall" if at_once else kind, named, brought)
        if in_place:
            self.items[node] = [self._of(one) for one in (written if isinstance(written, list | tuple) else [written])]
        elif kind.endswith("_coalesced"):
            self.items[node] = [frozenset([(node, i)]) for i in range(len(start.tensors))]
        else:
            self.items[node] = [frozenset([node])]
        self.storages[node] = results = frozenset().union(*self.items[node])
        if at_once:
            self.steps.append(Step(node, start, (start,)))
            return
        self.reading[start] = self._of(brought)
        self.writing.update(dict.fromkeys(results, start))
        self.steps.append(Step(node, start))

    def _compute(self, node: fx.Node, name: str, schema: Any) -> None:
        if node.op == "get_attr":
            self.storages[node] = frozenset([str(node.target)])
        elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self.storages[node] = self._item(node.args[0], node.args[1], node)
        elif node.op == "output":
            self.storages[node] = self._of(node.args)
        else:
            named = _arguments(node, schema)
            written = frozenset[Storage]().union(*(self._of(named[one]) for one in _written(schema) if one in named))
            aliased = frozenset[Storage]().union(*(self._of(named[one]) for one in _aliased(schema) if one in named))
            if written or not (aliased or name in _SIZES):
                self._use(node, self._of([node.args, node.kwargs]) - written, written)
            self.storages[node] = aliased or frozenset([node])

    def _item(self, of: fx.Node, index: Any, node: fx.Node) -> frozenset[Storage]:
        """The storages of one result of several; an op that returns no views makes a new one for each."""
        if of in self.items and isinstance(index, int):
            return self.items[of][index]
        return frozenset([(of, index)]) if self.storages[of] == frozenset([of]) else self.storages[of]

    def _of(self, value: Any) -> frozenset[Storage]:
        nodes = [one for one in tree_leaves(value) if isinstance(one, fx.Node)]
        return frozenset[Storage]().union(*(self.storages.get(one, frozenset()) for one in nodes))

    def _use(self, node: fx.Node, read: frozenset[Storage], written: frozenset[Storage]) -> None:
        """Note the first use of a buffer that a collective has not let go of."""
        if self.fault is not None:
            return
        found = [(start, True) for start, held in self.reading.items() if held & written]
        found += [(self.writing[one], True) for one in written if one in self.writing]
        found += [(self.writing[one], False) for one in read if one in self.writing]
        if found:
            self.fault = Fault(found[0][0], node, found[0][1])


def follow(graph: fx.GraphModule, call: str) -> Flow:
    """What the graph does.  Raises `NotCheckable` for communication that is not followed, or is in a graph of its own inside."""
    for name, inner in graph.named_modules():
        if inner is not graph and isinstance(inner, fx.GraphModule):
            odd = [node for node in inner.graph.nodes if _space(node) in _COMMUNICATION]
            if odd:
                values, problem = (
                    f"{name} has {line_of(odd[0])}",
                    "collectives in a graph inside of the graph are not followed",
                )
                raise errors.NotCheckable(call, "graph", values, problem, "Inline that graph first.")
    flow = Flow(graph.graph, call)
    for _ in flow.run():
        pass
    return flow


def line_of(node: fx.Node) -> str:
    """The node as a line of its graph: its position, name, target and arguments."""
    position = next(i for i, one in enumerate(node.graph.nodes) if one is node)
    arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    return f"line {position}: {node.name} = {node.target}({', '.join(arguments)})"


def place_of(node: fx.Node) -> Place | None:
    """The line of the program from which the node was traced, the innermost that its stack trace has."""
    found = findall(r'File "([^"]+)", line (\d+), in (\S+)', node.stack_trace or "")
    return place_at(found[-1][0], int(found[-1][1]), found[-1][2]) if found else None


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The tensors of a node's meta, or the attribute that it reads."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr" and node.graph.owning_module is not None:
        value = attrgetter(str(node.target))(node.graph.owning_module)
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def sizes_of(tensor: Tensor, node: fx.Node, call: str) -> torch.Size:
    """The shape in numbers; a symbolic size counts as the example that was traced.  Raises `NotCheckable` without one."""
    found = [one if isinstance(one, int) else one.node.hint for one in tensor.shape]
    if None in found:
        problem = "a size has no number: it depends on data"
        raise errors.NotCheckable(call, "graph", line_of(node), problem, "Trace it with a size that is known.")
    return torch.Size(map(int, found))


def _start_of(node: fx.Node, call: str, kind: str, named: dict[str, Any], brought: Any) -> Start:
    nodes = [one for one in tree_leaves(brought) if isinstance(one, fx.Node)]
    found = [(one, tensor) for one in nodes for tensor in tensors_of(one)]
    if len(found) != len(nodes) or not nodes:
        problem = "the shape and dtype of its argument are unknown: a node has no meta['val']"
        raise errors.NotCheckable(
            call, "graph", line_of(node), problem, "Trace by make_fx or AOTAutograd, or run FakeTensorProp."
        )
    group = named.get("group_name")
    return Start(
        node,
        kind,
        group if isinstance(group, str) else str(getattr(group, "group_name", group)),
        tuple((tensor.dtype, sizes_of(tensor, one, call)) for one, tensor in found),
        found[0][1].device,
        named.get("reduce_op"),
        named.get("src"),
        named.get("group_size"),
        _numbers(named.get("input_split_sizes")),
        _numbers(named.get("output_split_sizes")),
    )


def _numbers(splits: Sequence[Any] | None) -> list[int] | None:
    """Split sizes in numbers; None where one is unknown."""
    values = [one.meta.get("val") if isinstance(one, fx.Node) else one for one in splits or ()]
    sizes = [one.node.hint if isinstance(one, torch.SymInt) else one for one in values]
    found = [one for one in sizes if isinstance(one, int)]
    return found if len(found) == len(sizes) > 0 else None


def _schema(node: fx.Node) -> Any:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", target)
    return getattr(target, "_schema", None) if node.op == "call_function" else None


def _space(node: fx.Node) -> str:
    schema = _schema(node)
    space, _, name = str(schema.name).partition("::") if schema is not None else ("", "", "")
    return "" if name in WAITS else space


def _arguments(node: fx.Node, schema: Any) -> dict[str, Any]:
    names = [one.name for one in schema.arguments] if schema is not None else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _written(schema: Any) -> list[str]:
    """The arguments to which an op writes."""
    arguments = schema.arguments if schema is not None else ()
    return [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]


def _aliased(schema: Any) -> list[str]:
    """The arguments whose storage an op returns; for a list of views the schema names no alias set."""
    if schema is None:
        return []
    returned = [one.alias_info.before_set for one in schema.returns if one.alias_info is not None]
    held = [one for one in schema.arguments if one.alias_info is not None]
    return [one.name for one in held if any(not of or one.alias_info.before_set & of for of in returned)]
