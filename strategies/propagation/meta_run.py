"""The shapes and dtypes of a call's results, computed without data.  Thread-safe.

Meta tensors are tried first: they need no mode, so threads do not interfere.  An op without a meta kernel is tried by
its decomposition, and then in fake-tensor mode, in one thread at a time: that mode has process-global state.

| torch part                                             | why                                     | read on     | run on |
|--------------------------------------------------------|-----------------------------------------|-------------|--------|
| torch.utils._python_dispatch._disable_current_modes    | leaves the caller's dispatch modes      | 2.11 - 2.15 | 2.13   |
| torch._C.DisableTorchFunction                          | and the caller's function modes         | 2.11 - 2.15 | 2.13   |
| torch._decomp.decomposition_table                      | a decomposition runs on meta tensors    | 2.11 - 2.15 | 2.13   |
| torch._subclasses.fake_tensor: FakeTensorMode,         | ops that only fake mode knows; shapes   | 2.11 - 2.15 | 2.13   |
| DynamicOutputShapeException, DataDependentOutputException | that depend on values                |             |        |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from localtensor._util import ambient
from localtensor.concurrency import Sync
from localtensor.threads import AUTOCAST_DEVICES
from strategies.model.rule import Call, Leaf, flat_results, overload
from strategies.ops.semantics.local_call import InvalidCall, NoMetadata
from strategies.ops.semantics.rule_registry import Meta

_META = torch.device("meta")


class _NoDecomposition(Exception):
    """torch has no decomposition of the op."""


_REFUSED = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, OverflowError, KeyError, AttributeError)


def output_metas(call: Call, tensors: Sequence[Meta], lock: AbstractContextManager[Any]) -> tuple[Meta | None, ...]:
    """Shape and dtype of each result in a flat list, None for one that is no tensor.  All callers share `lock`.

    Raises `NoMetadata` if the shapes depend on values (nonzero), `InvalidCall` if the op refuses the arguments.

    >>> import threading
    >>> from strategies.model.rule import Leaf
    >>> metas = Meta((4, 3), torch.float32), Meta((3, 2), torch.float32)
    >>> output_metas(Call("aten.mm.default", (Leaf(0), Leaf(1))), metas, threading.Lock())
    (f32[4,2],)
    """
    with no_caller_modes():
        return tuple(
            Meta(tuple(map(int, x.shape)), x.dtype) if isinstance(x, Tensor) else None
            for x in flat_results(_run(on_meta_device(call), tensors, lock))
        )


class _Shared:
    """A lock that lives as long as its services.  It is free in a forked child, which lacks the thread that held it."""

    def __init__(self, sync: Sync) -> None:
        self.lock: AbstractContextManager[Any] = sync.lock()
        ambient.add_cache(self)

    def clear(self) -> None:
        """Nothing is cached here."""

    def after_fork(self) -> None:
        renew = getattr(self.lock, "_at_fork_reinit", None)  # of Python's own lock; one of another kind never forks
        if renew is not None:
            renew()


def fake_mode_lock(sync: Sync) -> AbstractContextManager[Any]:
    """The lock for fake-tensor mode of all users of these services."""
    shared: _Shared = vars(sync).get("fake mode") or vars(sync).setdefault("fake mode", _Shared(sync))
    return shared.lock


@contextmanager
def no_caller_modes() -> Iterator[None]:
    """While active, the caller's dispatch and function modes, autograd and autocast are off.

    Of all ambient settings only the default dtype affects what is computed inside.
    """
    on = [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in on:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def on_meta_device(call: Call) -> Call:
    """The same call with `device` and `pin_memory` arguments, if any, set for the meta device."""
    names = [a.name for a in overload(call.op)._schema.arguments]
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in (("device", _META), ("pin_memory", False)):
        if name in names:
            spot = names.index(name)
            if spot < len(args):
                args[spot] = value
            elif name == "device" or name in kwargs:
                kwargs[name] = value
    return Call(call.op, tuple(args), tuple(kwargs.items()))


def _run(call: Call, tensors: Sequence[Meta], lock: AbstractContextManager[Any]) -> object:
    reasons = []
    for attempt in (_plain, _decomposed, partial(_fake, lock)):
        try:
            return attempt(call, tensors)
        except (NotImplementedError, _NoDecomposition) as error:
            reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
        except _value_dependent_errors() as error:
            raise _value_dependent(call, tensors) from error
        except _REFUSED as error:
            if "on meta tensors" in str(error):  # the message of item()
                raise _value_dependent(call, tensors) from error
            if attempt is _plain:
                raise InvalidCall(
                    call.op,
                    "args",
                    _shown(call, tensors),
                    f"the op refuses them on meta tensors: {_first_line(error)}",
                    "Call it on meta tensors of these shapes, and repair what it says.",
                ) from error
            reasons.append(_first_line(error))
    raise NoMetadata(
        call.op,
        _shown(call, tensors),
        f"no meta kernel, no decomposition and no fake kernel gives its shapes ({'; '.join(dict.fromkeys(reasons))})",
        "Register a fake kernel with torch.library.register_fake.",
    )


def _value_dependent(call: Call, tensors: Sequence[Meta]) -> NoMetadata:
    return NoMetadata(
        call.op,
        _shown(call, tensors),
        "the shapes of its results depend on the values of its inputs",
        "Run it on replicated tensors outside of propagation.",
    )


def _made(tensors: Sequence[Meta]) -> list[Tensor]:
    return [torch.empty(m.shape, dtype=m.dtype, device=_META) for m in tensors]


def _plain(call: Call, tensors: Sequence[Meta]) -> object:
    return call(_made(tensors))


def _decomposed(call: Call, tensors: Sequence[Meta]) -> object:
    from torch._decomp import decomposition_table

    func = decomposition_table.get(overload(call.op))
    if func is None:
        raise _NoDecomposition("no decomposition")
    args, kwargs = call.filled(_made(tensors))
    return func(*args, **kwargs)


def _fake(lock: AbstractContextManager[Any], call: Call, tensors: Sequence[Meta]) -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with lock, FakeTensorMode():
        return call([torch.empty(m.shape, dtype=m.dtype) for m in tensors])


def _value_dependent_errors() -> tuple[type[BaseException], ...]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _shown(call: Call, tensors: Sequence[Meta]) -> str:
    def show(value: object) -> str:
        if isinstance(value, Leaf):
            return repr(tensors[value.index]) if value.index < len(tensors) else repr(value)
        return f"[{', '.join(map(show, value))}]" if isinstance(value, (list, tuple)) else repr(value)

    shown = [*map(show, call.args), *(f"{name}={show(value)}" for name, value in call.kwargs)]
    return f"({', '.join(shown)})"
