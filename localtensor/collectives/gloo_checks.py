"""Checks of the lists of tensors that a rank passes to c10d, in gloo's order: the first sentence that gloo would say is the reason.

They are made of the arguments as they are passed, before anything else.  Programs that look for gloo's words find them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.collectives.argument_checks import check_contiguous, check_rank
from localtensor.errors import RefusedByGloo

Lists = Sequence[Sequence[Tensor]]


def check_like_gloo(kind: str, arguments: Sequence[Any], rank: int, ranks: int) -> None:
    """Check the arguments of a c10d op of this kind; `rank` is a number of the group.  Raises `RefusedByGloo`, `RankOutside`."""
    check = CHECKS.get(kind)
    if check is not None:
        check(kind, rank, ranks, *arguments)


def _refuse(kind: str, argument: str, values: str, words: str, remedy: str) -> None:
    raise RefusedByGloo(kind, argument, values, words, remedy)


def _alike(kind: str, argument: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for index, x in enumerate(tensors):
        for what, mine, first in (
            ("layout", x.layout, like.layout),
            ("type", x.dtype, like.dtype),
            ("size", tuple(x.shape), tuple(like.shape)),
        ):
            if mine != first:
                words = f"invalid tensor {what} at index {index} (expected {first}, got {mine})"
                remedy = "Let the tensors of one call have one dtype, one layout and one shape."
                _refuse(kind, argument, f"{argument}[{index}]", words, remedy)


def _one(kind: str, argument: str, tensors: Sequence[Tensor], words: str) -> None:
    if len(tensors) != 1:
        _refuse(kind, argument, f"{len(tensors)} tensors", f"requires a single-element {words}", "Pass a list of one.")


def _root_tensor(kind: str, tensors: Sequence[Tensor], index: int) -> None:
    if not 0 <= index < len(tensors):
        values, words = f"rootTensor={index} of {len(tensors)}", f"invalid root tensor: {index}"
        _refuse(kind, "rootTensor", values, words, "Name one of the tensors in the list.")


def _broadcast(
    kind: str, rank: int, ranks: int, tensors: Sequence[Tensor], root: int, index: int, *rest: object
) -> None:
    check_rank(kind, "root", root, ranks)
    _root_tensor(kind, tensors, index)
    _alike(kind, "tensors", tensors, tensors[0])


def _all_reduce(kind: str, rank: int, ranks: int, tensors: Sequence[Tensor], op: object = "sum", *rest: object) -> None:
    if not tensors:
        _refuse(kind, "tensors", "[]", "requires non-empty tensor list", "Pass a tensor.")
    if len(tensors) > 1:
        _alike(kind, "tensors", tensors, tensors[0])
    if tensors[0].layout == torch.sparse_coo and op != "sum":
        words = "unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)"
        _refuse(kind, "op", repr(op), words, "Pass x.to_dense().")


def _all_reduce_coalesced(kind: str, rank: int, ranks: int, tensors: Sequence[Tensor], *rest: object) -> None:
    if not tensors:
        _refuse(kind, "tensors", "[]", "requires non-empty tensor list", "Leave the call out.")
    for index, x in enumerate(tensors):
        if x.layout != tensors[0].layout:
            words = f"invalid tensor layout at index {index} (expected {tensors[0].layout}, got {x.layout})"
            _refuse(kind, "tensors", f"tensors[{index}]", words, "Pass dense tensors.")
    if any(x.dtype != tensors[0].dtype for x in tensors):
        dtypes = ", ".join(dict.fromkeys(str(x.dtype) for x in tensors))
        _refuse(kind, "tensors", dtypes, "tensors must all have the same type", "Make a call for each dtype.")
    if tensors[0].layout != torch.strided:
        _refuse(kind, "tensors", str(tensors[0].layout), "unsupported layout", "Pass dense tensors.")


def _reduce(
    kind: str, rank: int, ranks: int, tensors: Sequence[Tensor], op: object, root: int, index: int, *rest: object
) -> None:
    check_rank(kind, "root", root, ranks)
    _root_tensor(kind, tensors, index)
    _one(kind, "tensors", tensors, "tensor list")


def _all_gather(kind: str, rank: int, ranks: int, outputs: Lists, inputs: Sequence[Tensor], *rest: object) -> None:
    if not inputs:
        _refuse(kind, "inputs", "[]", "requires non-empty input tensor list", "Pass a tensor.")
    if len(outputs) != len(inputs):
        values, words = (
            f"{len(inputs)} and {len(outputs)}",
            "requires input/output tensor lists to have the same length",
        )
        _refuse(kind, "outputs", values, words, "Pass a list of outputs for each input.")
    want = len(inputs) * ranks
    for index, each in enumerate(outputs):
        if len(each) != want:
            words = f"invalid output tensor list at index {index} (expected length {want}, got {len(each)})"
            _refuse(kind, "outputs", f"{len(each)} tensors", words, f"Let rank {rank} bring a list of {want}.")
    _alike(kind, "inputs", inputs, inputs[0])
    for each in outputs:
        _alike(kind, "outputs", each, inputs[0])


def _all_gather_coalesced(
    kind: str, rank: int, ranks: int, outputs: Lists, inputs: Sequence[Tensor], *rest: object
) -> None:
    if not inputs:
        _refuse(kind, "inputs", "[]", "requires non-empty input tensor list", "Leave the call out.")
    if len(outputs) != ranks:
        words = "output lists should be equal to world size"
        _refuse(kind, "outputs", f"{len(outputs)} lists", words, f"Pass {ranks} lists.")
    for each in outputs:
        if len(each) != len(inputs):
            words = f"invalid output size: (expected length {len(inputs)}, got {len(each)})"
            _refuse(kind, "outputs", f"{len(each)} tensors", words, "Pass an output for each input.")
        for index, (output, source) in enumerate(zip(each, inputs, strict=True)):
            if output.shape != source.shape:
                words = f"invalid size of output tensor at index {index} (expected length {tuple(source.shape)}, got {tuple(output.shape)})"
                _refuse(kind, "outputs", f"[{index}]", words, "Make the output of the input's shape.")
            if output.dtype != source.dtype:
                words = f"invalid tensor type at index {index} (expected {source.dtype}, got {output.dtype})"
                _refuse(kind, "outputs", f"[{index}]", words, "Make the output of the input's dtype.")


def _pieces(kind: str, side: str, rank: int, root: int, ranks: int, lists: Lists) -> None:
    """The pieces of a gather or a scatter, of which only the root has any."""
    if rank != root:
        if lists:
            words = f"requires empty {side} on non-root"
            _refuse(kind, f"{side}s", f"{len(lists)} lists", words, f"Let rank {rank} bring an empty list.")
        return
    if len(lists) != 1:
        words = f"requires a single-element {side} list containing a list with {ranks} tensors"
        _refuse(kind, f"{side}s", f"{len(lists)} lists", words, "Pass one list in a list.")
    if len(lists[0]) != ranks:
        words = f"Incorrect {side} list size {len(lists[0])}. {side.capitalize()} list size should be {ranks}, same as size of the process group"
        _refuse(kind, f"{side}s", f"{len(lists[0])} tensors", words, f"Let rank {rank} bring a list of {ranks}.")


def _gather(
    kind: str, rank: int, ranks: int, outputs: Lists, inputs: Sequence[Tensor], root: int, *rest: object
) -> None:
    check_rank(kind, "root", root, ranks)
    _one(kind, "inputs", inputs, "input tensor list")
    _pieces(kind, "output", rank, root, ranks, outputs)
    if rank == root:
        _alike(kind, "outputs", outputs[0], inputs[0])


def _scatter(
    kind: str, rank: int, ranks: int, outputs: Sequence[Tensor], inputs: Lists, root: int, *rest: object
) -> None:
    check_rank(kind, "root", root, ranks)
    _one(kind, "outputs", outputs, "output tensor list")
    _pieces(kind, "input", rank, root, ranks, inputs)
    if rank == root:
        _alike(kind, "inputs", inputs[0], outputs[0])


def _all_to_all_single(kind: str, rank: int, ranks: int, output: Tensor, source: Tensor, *rest: object) -> None:
    check_contiguous(kind, {"output": output, "input": source})


CHECKS: dict[str, Callable[..., None]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
}
