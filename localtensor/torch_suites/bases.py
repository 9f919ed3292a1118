"""The test bases of torch that run on rank threads, and the replacement of their methods."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.testing._internal import common_distributed

from localtensor._util.patching import replaced
from localtensor.errors.base import Refusal
from localtensor.torch_suites import continuous, multi_process, multi_threaded
from localtensor.torch_suites.rank_run import SuiteOptions

SUITE_MODULES = (multi_process, multi_threaded, continuous)


@contextmanager
def bases_on_rank_threads(how: SuiteOptions) -> Iterator[None]:
    """While inside, torch's own bases and all their subclasses run on rank threads."""
    with ExitStack() as stack:
        for module in SUITE_MODULES:
            owner = module.BASE
            for name, method in module.replaced_methods(owner, how).items():
                stack.enter_context(replaced(owner, name, method))
        decorator = multi_threaded.comms_decorator(how)
        stack.enter_context(replaced(common_distributed, "spawn_threads_and_init_comms", decorator))
        yield


class NotASuite(Refusal):
    """A class that is to run on rank threads is no subclass of torch's test bases."""

    def __init__(self, cls: object) -> None:
        names = ", ".join(module.BASE.__name__ for module in SUITE_MODULES)
        shown = getattr(cls, "__qualname__", type(cls).__name__)
        problem = "it is over none of torch's test bases"
        super().__init__("on_rank_threads", "cls", shown, problem, f"Use one of {names}.")


def replace_methods(cls: object, how: SuiteOptions) -> None:
    """Makes the class run on rank threads; methods that it or a class below torch's base overrides stay.

    Raises `NotASuite` if it is no subclass of torch's bases.
    """
    for module in SUITE_MODULES:
        if isinstance(cls, type) and issubclass(cls, module.BASE):
            for name, method in module.replaced_methods(cls, how).items():
                if not _overridden(cls, module.BASE, name):
                    setattr(cls, name, method)
            return
    raise NotASuite(cls)


def is_suite(cls: type) -> bool:
    return issubclass(cls, tuple(module.BASE for module in SUITE_MODULES))


def _overridden(cls: type, owner: type, name: str) -> bool:
    """Whether a class before torch's base in the MRO defines the method: the author's, or ours already."""
    above = cls.__mro__[: cls.__mro__.index(owner)]
    return any(name in vars(one) for one in above)
