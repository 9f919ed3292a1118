"""The only package that touches DTensor's private parts."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.torch_api.cpu_kernels import lacks_kernel as lacks_kernel
    from strategies.torch_api.handler_table import Handler as Handler
    from strategies.torch_api.handler_table import Ours as Ours
    from strategies.torch_api.handler_table import View as View
    from strategies.torch_api.mesh_and_caches import averages as averages
    from strategies.torch_api.mesh_and_caches import forget as forget
    from strategies.torch_api.population import FAMILIES as FAMILIES
    from strategies.torch_api.population import Member as Member
    from strategies.torch_api.propagation_memo import remembering as remembering
    from strategies.torch_api.redistribute_plans import Refusal as Refusal
    from strategies.torch_api.redistribute_plans import Transform as Transform
    from strategies.torch_api.redistribute_plans import spec_seen as spec_seen
    from strategies.torch_api.redistribute_plans import transforms as transforms
    from strategies.torch_api.specs import NoSuchSpec as NoSuchSpec
    from strategies.torch_api.specs import decoded as decoded
    from strategies.torch_api.specs import device_mesh as device_mesh
    from strategies.torch_api.specs import of_torch as of_torch
    from strategies.torch_api.specs import to_torch as to_torch
    from strategies.torch_api.user_modules import BadRules as BadRules
    from strategies.torch_api.user_modules import Registered as Registered
    from strategies.torch_api.user_modules import imported as imported
    from strategies.torch_api.user_modules import words_of as words_of

__all__ = [
    "FAMILIES",
    "BadRules",
    "Handler",
    "Member",
    "NoSuchSpec",
    "Ours",
    "Refusal",
    "Registered",
    "Transform",
    "View",
    "averages",
    "decoded",
    "device_mesh",
    "forget",
    "imported",
    "lacks_kernel",
    "of_torch",
    "remembering",
    "spec_seen",
    "to_torch",
    "transforms",
    "words_of",
]

_ROOM = {
    "BadRules": "strategies.torch_api.user_modules",
    "FAMILIES": "strategies.torch_api.population",
    "Handler": "strategies.torch_api.handler_table",
    "Member": "strategies.torch_api.population",
    "NoSuchSpec": "strategies.torch_api.specs",
    "Ours": "strategies.torch_api.handler_table",
    "Refusal": "strategies.torch_api.redistribute_plans",
    "Registered": "strategies.torch_api.user_modules",
    "Transform": "strategies.torch_api.redistribute_plans",
    "View": "strategies.torch_api.handler_table",
    "averages": "strategies.torch_api.mesh_and_caches",
    "decoded": "strategies.torch_api.specs",
    "device_mesh": "strategies.torch_api.specs",
    "forget": "strategies.torch_api.mesh_and_caches",
    "imported": "strategies.torch_api.user_modules",
    "lacks_kernel": "strategies.torch_api.cpu_kernels",
    "of_torch": "strategies.torch_api.specs",
    "remembering": "strategies.torch_api.propagation_memo",
    "spec_seen": "strategies.torch_api.redistribute_plans",
    "to_torch": "strategies.torch_api.specs",
    "transforms": "strategies.torch_api.redistribute_plans",
    "words_of": "strategies.torch_api.user_modules",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
