"""The graphs that a rank records and compiles, as lines to compare: in lockstep they are those of a real rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functorch.compile import aot_function
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

MESH: list[Any] = []  # of the rank, or of the mode, that runs


def pointwise(x: Tensor) -> Tensor:
    return (x * x.exp() + torch.ones(2)).relu()


def reduced(x: Tensor) -> Tensor:
    return functional.all_reduce(x * 2, "sum", MESH[0].get_group(0)) * x


def scattered(x: Tensor) -> Tensor:
    parts = functional.reduce_scatter_tensor(x @ x.t(), "sum", 0, MESH[0].get_group(0))
    return functional.all_gather_tensor(parts, 0, MESH[0].get_group(0)).sum(1)


def normalized(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (2,)).view(-1)[1:]


def multiplied(x: Tensor) -> Tensor:
    left = DTensor.from_local(x, MESH[0], [Shard(1)], run_check=False)
    right = DTensor.from_local(x.t().contiguous(), MESH[0], [Shard(0)], run_check=False)
    return (left @ right).redistribute(MESH[0], [Replicate()]).to_local()


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [pointwise, reduced, scattered, normalized, multiplied]


def lines(graph: fx.GraphModule) -> list[str]:
    """A line for each node: its op, its arguments by position, and the shape of its value; group names are numbered."""
    number = {node: f"%{place}" for place, node in enumerate(graph.graph.nodes)}
    groups: dict[str, str] = {}

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return number[value]
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, str) and (value.isdigit() or value.startswith("lockstep") or "mesh" in value):
            return groups.setdefault(value, f"group {len(groups)}")
        return repr(value)

    found = []
    for node in graph.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        shape = f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, Tensor) else ""
        target = "" if node.op == "placeholder" else getattr(node.target, "__name__", None) or node.target
        named = ", ".join(f"{name}={text(each)}" for name, each in node.kwargs.items())
        found.append(f"{number[node]} {node.op} {target} {text(node.args)} {named} {shape}")
    return found


def graphs() -> dict[str, list[str]]:
    """The graphs of every function: of make_fx, of AOTAutograd forward and backward, of Dynamo, and of AOTAutograd behind it."""
    MESH[:] = [init_device_mesh("cpu", (dist.get_world_size(),))]
    x = torch.arange(4.0).view(2, 2) + dist.get_rank()
    found: dict[str, list[str]] = {}
    for function in FUNCTIONS:
        torch.compiler.reset()
        name = function.__name__
        found[f"{name} by make_fx"] = lines(make_fx(function)(x))
        compiled: list[fx.GraphModule] = []

        def keep(graph: fx.GraphModule, inputs: Any, compiled: list[fx.GraphModule] = compiled) -> fx.GraphModule:
            compiled.append(graph)
            return graph

        def behind(graph: fx.GraphModule, inputs: Any, keep: Any = keep) -> Any:
            keep(graph, inputs)
            return aot_module_simplified(graph, inputs, fw_compiler=keep, bw_compiler=keep)

        if function is not multiplied:  # it makes DTensors
            aot_function(function, keep)(x.clone().requires_grad_()).sum().backward()
        torch.compile(function, backend=behind, fullgraph=True)(x.clone().requires_grad_()).sum().backward()
        found.update({f"{name}, graph {place}": lines(graph) for place, graph in enumerate(compiled)})
    return found
