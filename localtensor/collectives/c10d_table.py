"""c10d's ops, one entry each: what a rank brings to it, what it gets back, and which collective that is.

The names are those of the dispatcher's ops in torch/csrc/distributed/c10d/Ops.cpp; they have not changed from
torch 2.11 to 2.15, while the methods of ProcessGroup above them have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from localtensor.collectives import reference as collectives
from localtensor.collectives.rendezvous import Part


@dataclass(slots=True)
class Brought:
    """What one rank's call of a c10d op says: tensors that it reads and writes, and the arguments that count.

    `reads` is a tensor, a list, or a list of lists, as the collective wants it; `root`, `peer` are group ranks.
    """

    reads: Any
    writes: list[Tensor]
    op: Any = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One op: `read` sorts its arguments (without the process group), `compute` gives each rank what it writes.

    `alike` says what of the tensors must be the same on all ranks; `returns` what the op gives back besides
    its Work: the index of the argument, or None.  `by_output`: ranks are compared by what they write;
    `in_place`: a backend goes through memory as it lies, so that the ranks' strides must be alike, too.

    `alone` is the op that it is on the wire if it brings one tensor: functional collectives call coalesced ops for
    one tensor too, and meet ranks that call the plain ones.
    """

    kind: str
    read: Callable[..., Brought]
    compute: Callable[[Sequence[Part]], Sequence[Sequence[Tensor]]]
    alike: str = "shapes"
    returns: int | None = 0
    by_output: bool = False
    in_place: bool = False
    alone: str | None = None

    def brings(self, arguments: Sequence[Any]) -> "tuple[Served, Brought]":
        """What a rank's call says, and the op that the calls of its peers have to fit."""
        brought = self.read(*arguments)
        if self.alone is None or len(brought.reads) != 1:
            return self, brought
        return SERVED[self.alone], replace(brought, reads=brought.reads[0])


def _held(parts: Sequence[Part]) -> list[Any]:
    return [part.inputs for part in parts]


def _root(parts: Sequence[Part]) -> int:
    return parts[0].group.ranks.index(parts[0].root) if parts[0].root is not None else 0


def _singly(results: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[x] for x in results]


def _splits(parts: Sequence[Part], name: str) -> list[list[int] | None]:
    return [getattr(part, name) for part in parts]


def _all_to_all_single(parts: Sequence[Part]) -> list[list[Tensor]]:
    sent, got = _splits(parts, "input_splits"), _splits(parts, "output_splits")
    return _singly(collectives.all_to_all_single(_held(parts), input_splits=sent, output_splits=got))


def _nothing(parts: Sequence[Part]) -> list[list[Tensor]]:
    return [[] for _ in parts]


def _coalesced(one: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Sequence[Part]], list[list[Tensor]]]:
    return lambda parts: collectives.coalesced(_held(parts), one)


def _scattered(parts: Sequence[Part]) -> list[list[Tensor]]:
    return _singly(collectives.scatter(_held(parts), _root(parts)))


def _gathered(held: list[Tensor]) -> list[Tensor]:
    """Scalars are gathered as one row each, as c10d does."""
    return collectives.all_gather_into_tensor([x.reshape(1) if x.dim() == 0 else x for x in held])


def _by_source(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Each rank's copy of all ranks' lists, one after the other."""
    columns = collectives.coalesced(lists, collectives.all_gather)
    return [[column[source] for source in range(len(lists)) for column in mine] for mine in columns]


SERVED: dict[str, Served] = {
    "allreduce_": Served(
        "all_reduce",
        lambda tensors, op, sparse: Brought(tensors[0], tensors, op=op),
        lambda parts: _singly(collectives.all_reduce(_held(parts), parts[0].op)),
        in_place=True,
    ),
    "allreduce_coalesced_": Served(
        "all_reduce_coalesced",
        lambda tensors, op: Brought(list(tensors), tensors, op=op),
        lambda parts: collectives.all_reduce_coalesced(_held(parts), parts[0].op),
        returns=None,
        alone="allreduce_",
    ),
    "reduce_": Served(
        "reduce",
        lambda tensors, op, root, index: Brought(tensors[0], tensors, op=op, root=root),
        lambda parts: _singly(collectives.reduce(_held(parts), parts[0].op, root=_root(parts))),
        returns=None,
        in_place=True,
    ),
    "broadcast_": Served(
        "broadcast",
        lambda tensors, root, index: Brought(tensors[0], tensors, root=root),
        lambda parts: _singly(collectives.broadcast(_held(parts), _root(parts))),
        in_place=True,
    ),
    "allgather_": Served(
        "all_gather",
        lambda outputs, inputs: Brought(inputs[0], outputs[0]),
        lambda parts: collectives.all_gather(_held(parts)),
    ),
    "_allgather_base_": Served(
        "all_gather_into_tensor",
        lambda output, source: Brought(source, [output]),
        lambda parts: _singly(_gathered(_held(parts))),
    ),
    "allgather_into_tensor_coalesced_": Served(
        "all_gather_into_tensor_coalesced",
        lambda outputs, inputs: Brought(list(inputs), outputs),
        _coalesced(_gathered),
        returns=None,
        alone="_allgather_base_",
    ),
    "allgather_coalesced_": Served(
        "all_gather_coalesced",
        lambda outputs, inputs: Brought(list(inputs), [x for output in outputs for x in output]),
        lambda parts: _by_source(_held(parts)),
        returns=None,
        alone="allgather_",
    ),
    "gather_": Served(
        "gather",
        lambda outputs, inputs, root: Brought(inputs[0], [x for output in outputs for x in output], root=root),
        lambda parts: collectives.gather(_held(parts), _root(parts)),
        returns=None,
    ),
    "scatter_": Served(
        "scatter",
        lambda outputs, inputs, root: Brought([x for each in inputs for x in each], outputs, root=root),
        _scattered,
        by_output=True,
    ),
    "reduce_scatter_": Served(
        "reduce_scatter",
        lambda outputs, inputs, op: Brought(inputs[0], outputs, op=op),
        lambda parts: _singly(collectives.reduce_scatter(_held(parts), parts[0].op)),
    ),
    "_reduce_scatter_base_": Served(
        "reduce_scatter_tensor",
        lambda output, source, op: Brought(source, [output], op=op),
        lambda parts: _singly(collectives.reduce_scatter_tensor(_held(parts), parts[0].op)),
    ),
    "reduce_scatter_tensor_coalesced_": Served(
        "reduce_scatter_tensor_coalesced",
        lambda outputs, inputs, op: Brought(list(inputs), outputs, op=op),
        lambda parts: _coalesced(lambda held: collectives.reduce_scatter_tensor(held, parts[0].op))(parts),
        returns=None,
        alone="_reduce_scatter_base_",
    ),
    "alltoall_base_": Served(
        "all_to_all_single",
        lambda output, source, got, sent: Brought(
            source, [output], input_splits=list(sent) or None, output_splits=list(got) or None
        ),
        _all_to_all_single,
        alike="dtype",
        returns=None,
    ),
    "alltoall_": Served(
        "all_to_all",
        lambda outputs, inputs: Brought(list(inputs), outputs),
        lambda parts: collectives.all_to_all(_held(parts)),
        alike="dtype",
    ),
    "barrier": Served("barrier", lambda tensor, devices: Brought([], []), _nothing, returns=None),
    "monitored_barrier_": Served(
        "monitored_barrier", lambda tensor, devices, timeout, everyone: Brought([], []), _nothing, returns=None
    ),
}

# Messages meet in pairs, so they have no `compute`.
SEND, RECV, RECV_FROM_ANYONE = "send", "recv_", "recv_any_source_"
