"""Which of torch's test bases run on rank threads, and what of a class is put in another's place for that."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.testing._internal import common_distributed

from localtensor._util.patching import replaced
from localtensor.errors.base import Refusal
from localtensor.torch_suites import continuous, multi_process, multi_threaded
from localtensor.torch_suites.rank_run import How

ROOMS = (multi_process, multi_threaded, continuous)


@contextmanager
def on_threads(how: How) -> Iterator[None]:
    """While inside, torch's own bases run on rank threads, and so does every class over them that is made or was."""
    with ExitStack() as stack:
        for room in ROOMS:
            owner = room.base()
            for name, method in room.methods(owner, how).items():
                stack.enter_context(replaced(owner, name, method))
        decorator = multi_threaded.comms_decorator(how)
        stack.enter_context(replaced(common_distributed, "spawn_threads_and_init_comms", decorator))
        yield


class NotASuite(Refusal):
    """A class over none of torch's bases was to run on rank threads."""

    def __init__(self, cls: object) -> None:
        names = ", ".join(room.base().__name__ for room in ROOMS)
        shown = getattr(cls, "__qualname__", type(cls).__name__)
        super().__init__(
            "on_rank_threads", "cls", shown, "it is over none of torch's test bases", f"Use one of {names}."
        )


def put_on(cls: Any, how: How) -> None:
    """The class runs on rank threads; what it or a class below torch's base has written itself stays.

    Raises `NotASuite` if it is over none of torch's bases.
    """
    for room in ROOMS:
        if isinstance(cls, type) and issubclass(cls, room.base()):
            for name, method in room.methods(cls, how).items():
                if not _own(cls, room.base(), name):
                    setattr(cls, name, method)
            return
    raise NotASuite(cls)


def is_suite(cls: type) -> bool:
    return issubclass(cls, tuple(room.base() for room in ROOMS))


def _own(cls: type, owner: type, name: str) -> bool:
    """Whether a class before torch's base has its own: of its author, or ours already."""
    above = cls.__mro__[: cls.__mro__.index(owner)]
    return any(name in vars(one) for one in above)
