"""Which modules all ranks share: a rule on the module's root, the first part of its name, and what was observed.

Shared are the standard library, torch, numpy, this package, the tools that run tests, and what these require by their
own metadata, or import where it is installed: their code holds the objects of one copy.  A package joins them when it is seen to register something once
per process, or when one of its C extensions takes Python objects of its package as it loads.  All else is a rank's own.
"""

import importlib.metadata
import re
import sys

OURS = ("localtensor", "strategies")  # what they require is theirs alone: a program that uses rich has its own
SEEDS = ("torch", "numpy", "pytest", "hypothesis")  # distributions, with all that they require
IMPORTED = {"spmd_types": "torch"}  # roots that a seed imports where they are installed, and does not require
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

STANDARD, RULE, NOT = "standard library", "required by {}", ""


class SharedRoots:
    """The roots that ranks share, each with the reason.  What is observed in one run is remembered for the next."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}  # of a root; empty for one that is a rank's own
        self._shared: dict[str, bool] = {}  # of a module's full name
        self._required: dict[str, str] | None = None
        self._observed: set[str] = set()

    def __contains__(self, name: str) -> bool:
        known = self._shared.get(name)
        if known is None:
            known = self._shared[name] = bool(self.reason(name.partition(".")[0]))
        return known

    def reason(self, root: str) -> str:
        """Why all ranks share the modules of this root; empty if each has its own."""
        if root not in self._reasons:
            self._reasons[root] = self._by_rule(root)
        return self._reasons[root]

    def observed(self, root: str, reason: str) -> list[str]:
        """From now on the root is shared, and what it requires that has nothing to do with torch; returns all of these.

        Its objects lead to those of what it requires, which pickle finds by name only if there is one copy.  A package that
        requires torch may keep its rank, and stays each rank's own.
        """
        new = [root, *(other for other in _required_without(root, "torch") if not self.reason(other))]
        for name in new:
            self._reasons[name] = reason if name == root else f"required by {root}, which is shared"
        self._observed.update(new)
        self._shared.clear()
        return new

    def is_observed(self, root: str) -> bool:
        """Whether the root is shared because of what it did."""
        return root in self._observed

    def seen(self) -> dict[str, str]:
        """The roots that were shared because of what they did, with the reasons."""
        return {root: why for root, why in self._reasons.items() if why and why != self._by_rule(root)}

    def _by_rule(self, root: str) -> str:
        if root in sys.stdlib_module_names or root in sys.builtin_module_names:
            return "" if root == "__main__" else STANDARD
        if root in OURS:
            return "this package"
        if root in IMPORTED:
            return f"imported by {IMPORTED[root]}"
        if self._required is None:
            self._required = _required_roots(SEEDS)
        by = self._required.get(root)
        return "" if by is None else f"required by {by}" if by != root else f"part of {by}"


def _required_roots(seeds: tuple[str, ...]) -> dict[str, str]:
    """The root modules of these distributions and of all that they require, each with the seed that needs it."""
    found: dict[str, str] = {}
    for seed in seeds:
        pending, done = [seed], set()
        while pending:
            distribution = pending.pop()
            if distribution in done:
                continue
            done.add(distribution)
            roots, required = _contents(distribution)
            for root in roots:
                found.setdefault(root, seed)
            pending += required
    return found


def _required_without(root: str, without: str) -> list[str]:
    """The root modules of what the distribution of this name requires, but for distributions that require `without`."""
    required, found = _contents(root)[1], list[str]()
    for distribution in dict.fromkeys(required):
        roots = _required_roots((distribution,))
        if without not in roots:
            found += roots
    return list(dict.fromkeys(found))


def _contents(distribution: str) -> tuple[list[str], list[str]]:
    """The root modules of a distribution, and the distributions that it always requires."""
    fallback = [distribution.replace("-", "_").replace(".", "_")]
    try:
        metadata = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return fallback, []
    listed = (metadata.read_text("top_level.txt") or "").split()
    required = [text for text in metadata.requires or () if "extra ==" not in text]
    names = [match.group() for match in map(_NAME.match, required) if match]
    return listed or fallback, [name.lower() for name in names]
