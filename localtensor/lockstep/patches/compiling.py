"""Fake tensors, AOTAutograd and `torch.compile` in lockstep: compiled once with one rank's metadata, run on all ranks' tensors.

To Dynamo and to AOTAutograd a LocalTensor is a plain tensor with the metadata that it has on every rank.  So the graphs are those of
a rank; they then run under the mode, on all ranks' tensors.  What differs between ranks has no place in one graph: Dynamo breaks the
graph there, and runs that part op by op, or raises with `fullgraph=True`; AOTAutograd raises `NotTraceable`.

Dynamo takes for granted that the number of ranks and the groups of a process never change.  So each mode compiles for itself, and
what it has compiled is forgotten when it ends.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache, wraps
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from localtensor._util.call_sites import Args, Fn, is_of_ours, is_user_file, place_of_frame
from localtensor.errors import LocalTensorError, NotTraceable
from localtensor.lockstep.comms.c10d_dispatch import share_memory
from localtensor.lockstep.dispatch.dispatcher import dtype_and_shape, plain_dispatch
from localtensor.lockstep.patches import kernels
from localtensor.lockstep.patches.rank_queries import patch_attribute
from localtensor.lockstep.patches.tracing import check_numbers, is_uneven, recorder
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode
from localtensor.lockstep.values.sym_nodes import RankBools, RankInts

_UNEVEN = "its shape or strides differ between ranks, and each of them needs a graph of its own"
_GRAPH_BREAK = "Differs between ranks of a LocalTensorMode"
_KNOWN = "_of_local_tensors"  # an attribute of a FakeTensorMode: the fake tensor of each LocalTensor
_SHARED = "it shares memory with another input, which a compiled graph would not see"


# -- fake tensors


def _fake(original: Fn, fakes: Any, tensor: Any, *args: Any, **kwargs: Any) -> object:
    """The fake tensor with the metadata that the tensor has on each rank.  Raises `NotTraceable`."""
    if type(tensor) is not LocalTensor:
        return original(fakes, tensor, *args, **kwargs)
    converter = fakes.fake_tensor_converter
    before = converter.export
    converter.export = True  # else a number is a symbol, with a guard on the value of one rank
    try:
        return _fake_of_one_rank(original, fakes, tensor, *args, **kwargs)
    finally:
        converter.export = before


def _fake_of_one_rank(original: Fn, fakes: Any, tensor: LocalTensor, *args: Any, **kwargs: Any) -> object:
    """As `_fake`, of a LocalTensor."""
    if getattr(kwargs.get("source"), "member", None) == "_base":  # the base of a view: Dynamo asks for its sizes alone
        return original(fakes, tensor_of_one_rank(tensor), *args, **kwargs)
    known = fakes.__dict__.setdefault(_KNOWN, WeakIdKeyDictionary())
    if tensor not in known:
        why = _no_fake(fakes, tensor)
        if why:
            raise _refused(tensor, *why)
        known[tensor] = original(fakes, tensor_of_one_rank(tensor), *args, **kwargs)
    return known[tensor]


def _no_fake(fakes: Any, x: LocalTensor) -> tuple[str, str] | None:
    """Why a LocalTensor cannot be compiled, and what to do; None if it can be."""
    if is_uneven(x):
        return _UNEVEN, "Pad it to one shape, or run this part op by op."
    known = fakes.__dict__.get(_KNOWN, ())
    if any(other is not x and share_memory(x, other) for other in known):
        return _SHARED, "Pass a clone, or take the view inside."
    return None


def _refused(x: LocalTensor, problem: str, remedy: str) -> NotTraceable:
    call = recorder("torch.compile")
    return NotTraceable(call, dtype_and_shape(x), problem, remedy, place_of_frame(sys._getframe(2)))


def tensor_of_one_rank(x: LocalTensor) -> Tensor:
    """A plain tensor with the metadata that x has on every rank."""
    with plain_dispatch():  # also below torch.func, which would wrap it
        cell = x._cells[0]  # its first row, which lies where a tensor of this rank alone would
        plain = (cell[0] if x._partition.sizes[0] > 1 else cell).detach()
        if not is_uneven(x) and plain.stride() != x.stride():  # of a dim of one element, say, which lies anyhow
            plain = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=plain.device).copy_(plain)
    with torch._C._DisableTorchDispatch(), torch.enable_grad():
        if isinstance(x, torch.nn.Parameter):
            return torch.nn.Parameter(plain, x.requires_grad)
        if x.requires_grad and x.is_leaf:
            plain.requires_grad_()
        return plain if x.is_leaf else _Computed.apply(torch.empty(0, requires_grad=True), [plain])


class _Computed(torch.autograd.Function):
    """The tensor of a list, as the result of a computation; its strides are as they were."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, held: list[Tensor]) -> Tensor:  # noqa: ARG004
        return held[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


def _fake_op(
    mode: Mode, original: Fn, fakes: Any, func: Any, types: Any, args: Args = (), kwargs: Any = None
) -> object:
    """An op on fake tensors.  Raises `NotTraceable` for an int of each rank, of which torch would ask its expression."""
    check_numbers(mode, args, kwargs or {})
    return original(fakes, func, types, args, kwargs)


def _describe(original: Fn, describer: Any, tensor: Any, *args: Any, **kwargs: Any) -> object:
    """The metadata of a LocalTensor within another tensor, such as a DTensor.  Raises `NotTraceable`."""
    if type(tensor) is LocalTensor:
        if is_uneven(tensor):
            raise _refused(tensor, _UNEVEN, "Pad it to one shape, or run this part op by op.")
        tensor = tensor_of_one_rank(tensor)
    return original(describer, tensor, *args, **kwargs)


# -- Dynamo, whose modules are imported by the first use of torch.compile


def one_shape_guard(guards: Any, guard: Any) -> None:
    """Add the guard that a tensor has one shape on all ranks; a guard on its sizes would get a bool of each rank.

    torch checks the guards of one value in the order of their functions' line numbers: this one's is low.
    """
    guards.get_guard_manager(guard).add_lambda_guard(_has_one_shape, ["one shape on all ranks"], guard.user_stack)


def _has_one_shape(x: object) -> bool:
    return type(x) is not LocalTensor or len(x._cells) == 1 or not is_uneven(x)


def _wrap(mode: Mode, original: Fn, builder: Any, value: Any) -> object:
    """An input of a compiled frame: a LocalTensor is a plain tensor of one rank; what differs otherwise breaks the graph."""
    if type(value) is LocalTensor:
        why = _no_fake(builder.tx.fake_mode, value)
        if why:
            _break_graph(f"{dtype_and_shape(value)}: {why[0]}", why[1])
        made = builder.wrap_tensor(value)
        builder.install_guards(one_shape_guard)
        return made
    if isinstance(value, DTensor) and any(_has_mask(placement) for placement in value.placements):
        _break_graph(f"{value.placements}: a mask of rows, made before", "Compile the lookup of rows together with it.")
    _check_number(value)
    return original(builder, value)


def _has_mask(placement: object) -> bool:
    """Whether it is the placement of looked up rows that waits for a reduction; torch's own compiler ends in an error of its own."""
    return isinstance(placement, _MaskPartial) and placement.mask_buffer.data is not None


def _constant(mode: Mode, original: Fn, tx: Any, value: Any) -> object:
    _check_number(value)
    return original(tx, value)


def _literal(mode: Mode, original: Fn, value: Any, *args: Any, **kwargs: Any) -> object:
    _check_number(value)
    return original(value, *args, **kwargs)


def _check_number(value: object) -> None:
    if isinstance(value, torch.SymInt | torch.SymBool) and type(value.node) in (RankInts, RankBools):
        _break_graph(f"{value.node}: a number that differs between ranks", "Compile what does not depend on it.")


def _call_of_skipped(mode: Mode, original: Fn, variable: Any, *args: Any, **kwargs: Any) -> object:
    """A call that Dynamo does not look into: a function of ours works on all ranks at once, of which a graph knows nothing."""
    module = getattr(variable.value, "__module__", None) or ""
    if module.partition(".")[0] == "localtensor":
        _break_graph(
            f"a call of localtensor.{variable.value.__name__}",
            "Do it outside of the function, or use torch's functional collectives.",
            whole=False,
        )
    return original(variable, *args, **kwargs)


def _break_graph(what: str, hint: str, *, whole: bool = True) -> None:
    """Raise the error by which Dynamo leaves a function as it is written; what that calls may still be compiled.

    If not the `whole` function is left, it is compiled before and behind the call.
    """
    from torch._dynamo.exc import unimplemented  # lazy: it takes seconds

    Compiler.breaks += 1
    unimplemented(
        gb_type=_GRAPH_BREAK,
        context=what,
        explanation=f"One graph serves all ranks, and it cannot hold {what}.",
        hints=[f"{hint} Without fullgraph=True this {'function' if whole else 'call'} runs op by op."],
        skip_frame=whole,  # an `if` on it has to find the frame as it is written
    )


def _plain_kind(mode: Mode, original: Fn, value: object) -> object:
    return None if type(value) is LocalTensor else original(value)


def _compile_frame(mode: Mode, original: Fn, *args: Any, **kwargs: Any) -> object:
    """Dynamo's compilation of a frame: an error of ours within it breaks the graph, as an error of torch would end the program."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError

    try:
        return original(*args, **kwargs)
    except (InternalTorchDynamoError, TorchRuntimeError) as error:
        reason = _reason(error)
        if reason is not None:
            _break_graph(_first_line(reason), "")
        if _GRAPH_BREAK in str(error):  # ours, which Dynamo wraps in an error of its own within an autograd function
            _break_graph(*_number_in(str(error)))
        raise


def _number_in(text: str) -> tuple[str, str]:
    """What a graph cannot hold, by the words of the error that was raised for it, and the hint."""
    return text.partition("it cannot hold ")[2].partition(".\n")[0] or "a value", "Compile what does not depend on it."


def _reason(error: BaseException | None) -> LocalTensorError | None:
    """The error of this package behind one of torch's."""
    while error is not None and not isinstance(error, LocalTensorError):
        error = error.__cause__ or error.__context__
    return error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Compiler:
    """Dynamo's callback for the frames of one mode: it compiles as `callback` does, into a cache of its own."""

    breaks = 0  # how many graphs were broken, see `_break_graph`

    def __init__(self, mode: Mode, callback: Any) -> None:
        from torch._dynamo.convert_frame import catch_errors_wrapper
        from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

        kernels.install()  # not before something is compiled: inductor takes a second to import
        converter = callback._torchdynamo_orig_backend
        compile_graph = converter._torchdynamo_orig_backend
        self._codes: set[CodeType] = set()
        self._broken: set[CodeType] = set()  # those with a break that a rank would not have
        skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        self._as_written = ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)

        def backend(*args: Any, **kwargs: Any) -> object:
            try:
                with kernels.compiling(mode):
                    made = compile_graph(*args, **kwargs)
                return kernels.or_as_recorded(made, args[0]) if self._apart else made
            except Exception as error:  # why: whatever torch made of an error of ours; others are raised again
                reason = _reason(error)
                if reason is None:
                    raise
                warnings.warn(
                    f"torch.compile: the graph runs op by op, as Dynamo recorded it: {_first_line(reason)}",
                    stacklevel=2,
                )
                return args[0].forward

        backend.__name__ = getattr(compile_graph, "__name__", "backend")
        backend.__dict__["compile_graph"] = compile_graph
        self._torchdynamo_orig_backend: Any = catch_errors_wrapper(
            converter._clone_with_backend(backend), callback.hooks
        )

    def __call__(self, frame: Any, *args: Any) -> object:
        if is_of_ours(frame.f_code) or is_of_ours(sys._getframe(1).f_code):
            return self._as_written  # and all that it calls, as the `__init__` of a dataclass
        self._codes.add(frame.f_code)
        before, self._apart = Compiler.breaks, self._is_apart(sys._getframe(1))
        done = self._torchdynamo_orig_backend(frame, *args)
        if Compiler.breaks > before:
            self._broken.add(frame.f_code)
        if Compiler.breaks > before and done.guarded_code is None and not is_user_file(frame.f_code.co_filename):
            return self._as_written  # a function of torch, whose parts rely on being compiled together or not at all
        return done

    def _is_apart(self, frame: FrameType | None) -> bool:
        """Whether a function is compiled by itself because its caller could not be."""
        while frame is not None and self._broken:
            if frame.f_code in self._broken:
                return True
            frame = frame.f_back
        return False

    def forget(self) -> None:
        """Forget what was compiled."""
        for code in self._codes:
            torch._C._dynamo.eval_frame.reset_code(code)


def _is_registered(mode: Mode, original: Fn, backend: Any) -> object:
    """Whether it is a backend of torch, behind which Dynamo forgets the tensors that it has seen; `swap_tensors` refuses them before."""
    from torch._dynamo.eval_frame import innermost_backend

    return original(innermost_backend(getattr(backend, "compile_graph", backend)))


def _forget_tensors(mode: Mode, original: Fn, fakes: Any) -> None:
    original(fakes)
    if fakes is not None:
        fakes.__dict__.pop(_KNOWN, None)


def _callback(mode: Any, original: Fn, callback: Any) -> object:
    """The callback of the mode, in place of one that compiles."""
    chosen = original(callback)
    if not hasattr(getattr(chosen, "_torchdynamo_orig_backend", None), "_clone_with_backend"):
        return chosen  # none, or Dynamo's own for a stance
    for known, compiler in mode.compilers:
        if known is chosen:
            return compiler
    mode.compilers.append((chosen, Compiler(mode, chosen)))
    return mode.compilers[-1][1]


def _torch_compile(mode: Mode, original: Fn, *args: Any, **kwargs: Any) -> object:
    made = original(*args, **kwargs)
    if not supported():
        install_in_dynamo()
        skips = any(not one.ignore_compile_internals() for one in _python_dispatch._get_current_dispatch_mode_stack())
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals = skips
        _python_dispatch.set_is_in_mode_without_ignore_compile_internals(skips)
    return made


@cache
def install_in_dynamo() -> None:
    """Patch Dynamo, which torch.compile imports."""
    from torch._dynamo import convert_frame, eval_frame, trace_rules
    from torch._dynamo.variables import builder, constant, functions
    from torch._functorch._aot_autograd import runtime_wrappers

    trace_rules.add("localtensor")
    trace_rules.clear_lru_cache()  # it knows functions by identity, and some were patched since
    patch_attribute(builder.VariableBuilder, "_wrap", _wrap)
    patch_attribute(builder.SourcelessBuilder, "create", _constant)
    patch_attribute(constant.ConstantVariable, "create", _literal)
    patch_attribute(functions.SkipFunctionVariable, "call_function", _call_of_skipped)
    patch_attribute(builder, "infer_subclass_type", _plain_kind)
    patch_attribute(convert_frame, "_compile", _compile_frame)
    patch_attribute(convert_frame, "_is_registered_backend", _is_registered)
    patch_attribute(convert_frame, "_clear_fake_mode_weakrefs", _forget_tensors)
    patch_attribute(eval_frame, "_callback_from_stance", _callback)
    if hasattr(runtime_wrappers, "HANDLED_TYPES"):  # of the mode that looks at a compiled function's first call
        runtime_wrappers.HANDLED_TYPES = proxy_tensor.HANDLED_TYPES


# Those of fake tensors serve LocalTensors outside of any mode, too.
PATCHES: list[tuple[Any, str, Fn]] = [
    (FakeTensorMode, "from_tensor", _fake),
    (MetaTensorDescriber, "describe_tensor", _describe),
]


@cache
def _install() -> None:
    patch_attribute(torch, "compile", _torch_compile)
    patch_attribute(FakeTensorMode, "dispatch", _fake_op)
    for owner, name, replacement in PATCHES:
        setattr(owner, name, _with_original(replacement, getattr(owner, name)))


def _with_original(replacement: Fn, original: Fn) -> Fn:
    @wraps(original)
    def routed(*args: Any, **kwargs: Any) -> object:
        return replacement(original, *args, **kwargs)

    return routed


def install() -> None:
    """Patch the functions of this module, once per process; those of Dynamo once it is imported."""
    _install()
    if "torch._dynamo" in sys.modules:
        install_in_dynamo()


def supported() -> bool:
    """Whether Dynamo may compile under a mode: not before it is patched."""
    return install_in_dynamo.cache_info().currsize > 0
