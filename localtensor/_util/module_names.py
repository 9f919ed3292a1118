"""The qualified names of a program's modules, without a change of the program: wrappers are left out of them."""

from __future__ import annotations

import re
from collections import Counter

from torch import nn

_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


def plain_name(name: str) -> str:
    """A qualified name without the names of wrappers.

    >>> plain_name("module.layers.0._checkpoint_wrapped_module.up.weight")
    'layers.0.up.weight'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def joined_name(prefix: str, name: str) -> str:
    """Two parts of a qualified name, either of which may be empty.

    >>> joined_name("encoder", "up"), joined_name("", "up"), joined_name("encoder", "")
    ('encoder.up', 'up', 'encoder')
    """
    return f"{prefix}.{name}" if prefix and name else prefix or name


class ModelNames:
    """The models of a program by name: modules that it calls from outside any other.

    The first is the model, whose name is empty; others are named by their class.

    >>> names = ModelNames()
    >>> [names.add(nn.Linear(1, 1)) for _ in range(3)]
    ['', 'Linear', 'Linear 2']
    """

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self._known: set[int] = set()
        self._of_class: Counter[str] = Counter()

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is one of the models, or inside of one."""
        return id(module) in self._known

    def add(self, module: nn.Module) -> str:
        """Makes a module one of the models; returns its name."""
        kind = type(module).__name__
        number = self._of_class[kind]
        name = "" if not self.models else f"{kind} {number + 1}" if number else kind
        self._of_class[kind] += bool(self.models)
        self.models[name] = module
        self._known.update(map(id, module.modules()))
        return name
