"""Which parameter of the ranks is which of one device, where a parallel program renames or fuses them: found by their values.

A parallel model may be another class: its parameters have other names, or one of them is what one device has as two to
four, put together along a dim (query, key and value), or the other way round.  Before the first step both programs hold equal
values, so that the layout search of `find_layout` says which belong together; equal values, as those of a bias of zeros, are kept
apart by their names.
"""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localtensor.testing.compare.divergence import Sides
from localtensor.testing.compare.find_layout import find_layout, layout_of_placements
from localtensor.testing.compare.watch import DROPOUT, Key, Observation, Region, Watch

MOST_FUSED = 4
"""Parameters that one is made of."""
MOST_SHOWN = 4
"""Parameters whose names the note of a report gives."""


@dataclass(frozen=True, slots=True)
class Fused:
    """The parameter `name` of one side is made of `parts` of the other, along `dim`; `on_ranks`: the ranks hold it whole.

    `sizes` are the shares of the parts in it.
    """

    name: str
    parts: tuple[str, ...]
    dim: int
    on_ranks: bool
    sizes: tuple[int, ...]

    def pair(self) -> tuple[str, str]:
        """A name of the ranks, and one of one device that belongs to it."""
        return (self.name, self.parts[0]) if self.on_ranks else (self.parts[0], self.name)


@dataclass(frozen=True)
class NameMap:
    """The names of one device for those of the ranks: of parameters, of modules, and of what is fused."""

    parameters: Mapping[str, str]
    modules: Mapping[str, str]
    fused: tuple[Fused, ...]

    def applied(self, sides: Sides) -> Sides:
        """The sides with one name for each parameter: that of one device, or of the one that is fused."""
        mine = [one for one in self.fused if one.on_ranks]
        theirs = [one for one in self.fused if not one.on_ranks]
        return replace(
            sides,
            reference=_fused(sides.reference, mine),
            slacks=_fused_slacks(sides, mine),
            ranks=tuple(_fused(self._renamed(one), theirs) for one in sides.ranks),
            blocks={one.name: one.sizes for one in self.fused},
        )

    def region_on_ranks(self, region: Region) -> Region:
        """The region of the ranks' program that is this one of the program on one device."""
        there = {name: own for own, name in self.modules.items()}
        return region._replace(module=there.get(region.module, region.module))

    def note(self) -> str:
        """What was taken for what, for a report."""
        found = [f"{own} is {name}" for own, name in self.parameters.items()]
        found += [f"{one.name} is {' and '.join(one.parts)}" for one in self.fused if one.on_ranks]
        found += [f"{' and '.join(one.parts)} are {one.name}" for one in self.fused if not one.on_ranks]
        more = f", and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        return f"by its values, on the ranks {', '.join(found[:MOST_SHOWN])}{more}"

    def _renamed(self, watch: Watch) -> Watch:
        def renamed(key: Key) -> Key:
            names = self.modules if key.kind in _OF_MODULES else self.parameters
            if key.kind == "buffer":
                module, _, leaf = key.name.rpartition(".")
                return key._replace(name=f"{self.modules[module]}.{leaf}") if module in self.modules else key
            return key._replace(name=names.get(key.name, key.name))

        ops = watch.ops
        return replace(
            watch,
            seen={renamed(key): one for key, one in watch.seen.items()},
            calls=Counter({(step, self.modules.get(name, name)): n for (step, name), n in watch.calls.items()}),
            tied={self.parameters.get(a, a): self.parameters.get(b, b) for a, b in watch.tied.items()},
            setup={self.modules.get(a, self.parameters.get(a, a)): lines for a, lines in watch.setup.items()},
            ops=None if ops is None else replace(ops, marks={renamed(key): at for key, at in ops.marks.items()}),
        )


_OF_MODULES = ("input", "output", "gradient of the output", DROPOUT)


def find_names(sides: Sides) -> NameMap | None:
    """The names that belong together; None where both sides have the same, or nothing fits."""
    mine = _parameters(sides.reference)
    each = [_parameters(rank) for rank in sides.ranks]
    lost = [name for name in mine if not any(name in one for one in each)]
    more = [name for name in each[0] if name not in mine and all(name in one for one in each)]
    search = _Search(sides, mine, each, lost, more)
    search.run()
    if not search.found and not search.fused:
        return None
    return NameMap(search.found, _modules(sides, search.found), tuple(search.fused))


def _parameters(watch: Watch) -> dict[str, Observation]:
    return {key.name: one for key, one in watch.seen.items() if key.kind == "parameter" and key.step == 0}


@dataclass(slots=True)
class _Search:
    """The names without a counterpart: `lost` of one device, `more` of the ranks; each is taken out when it is found."""

    sides: Sides
    mine: Mapping[str, Observation]
    each: Sequence[Mapping[str, Observation]]
    lost: list[str]
    more: list[str]
    found: dict[str, str] = field(default_factory=dict)
    fused: list[Fused] = field(default_factory=list)

    def run(self) -> None:
        """Finds parameters whose elements differ first: the others, as biases of zeros, follow the names of those."""
        for telling in (True, False):
            for name in [name for name in self.more if _is_telling(self.each[0][name].value) == telling]:
                self._rename(name)
            for one in (True, False):
                for name in [name for name in (self.more if one else self.lost) if self._tells(name, one) == telling]:
                    self._fuse(name, one)

    def _tells(self, name: str, on_ranks: bool) -> bool:
        return _is_telling((self.each[0] if on_ranks else self.mine)[name].value)

    def _rename(self, name: str) -> None:
        held = [one[name] for one in self.each]
        for other in sorted(self.lost, key=lambda other: -self._likeness(name, other)):
            if self._fits([x.value for x in held], self.mine[other].value, held[0]):
                self.found[name] = other
                self.more.remove(name)
                self.lost.remove(other)
                return

    def _likeness(self, name: str, other: str) -> float:
        """How alike two names are; most where modules around both were found to be the same, the nearer the more."""
        known = {pair for found in self.found.items() for pair in _around(*found)}
        known |= {pair for one in self.fused for pair in _around(*one.pair())}
        near = next((level for level, pair in enumerate(_around(name, other)) if pair in known), None)
        same = 0.0 if near is None else 3.0 - near / 8
        leaf, end = name.rpartition(".")[2], other.rpartition(".")[2]
        alike = difflib.SequenceMatcher(None, name.split("."), other.split(".")).ratio()
        return same + (leaf == end) + alike + difflib.SequenceMatcher(None, name, other).ratio() / 8

    def _fuse(self, name: str, on_ranks: bool) -> None:
        groups = list(_groups(self.lost if on_ranks else self.more))

        def unlike(parts: tuple[str, ...]) -> float:
            return -self._likeness(*((name, parts[0]) if on_ranks else (parts[0], name)))

        for parts in sorted(groups, key=unlike):
            for dim in range((self.each[0] if on_ranks else self.mine)[name].value.dim()):
                sizes = self._fit_of_parts(name, parts, dim, on_ranks)
                if sizes:
                    self.fused.append(Fused(name, parts, dim, on_ranks, sizes))
                    (self.more if on_ranks else self.lost).remove(name)
                    for part in parts:
                        (self.lost if on_ranks else self.more).remove(part)
                    return

    def _fit_of_parts(self, name: str, parts: tuple[str, ...], dim: int, on_ranks: bool) -> tuple[int, ...] | None:
        """The shares of the parts, if the parameter is made of them along the dim."""
        if on_ranks:
            pieces = [self.mine[part].value for part in parts]
            held, want = [one[name].value for one in self.each], _put_together(pieces, dim)
            first = self.each[0][name]
        else:
            pieces = [self.each[0][part].value for part in parts]
            made = [_put_together([one[part].value for part in parts], dim) for one in self.each]
            held, want = [x for x in made if x is not None], self.mine[name].value
            first = replace(self.each[0][parts[0]], placements=None)
        if want is None or len(held) < len(self.each):
            return None
        sizes = tuple(x.shape[dim] for x in pieces)
        return sizes if self._fits(held, want, first, sizes) else None

    def _fits(self, held: Sequence[Tensor], want: Tensor, one: Observation, blocks: Sequence[int] = ()) -> bool:
        if held[0].dim() != want.dim() or sum(x.numel() for x in held) < want.numel():
            return False
        first, exact = layout_of_placements(one, len(self.sides.sizes)), torch.zeros(())
        layout = find_layout(held, self.sides.sizes, want, exact, first=first, blocks=blocks)
        return layout is not None and not layout.pending


def _around(name: str, other: str) -> Iterator[tuple[str, str]]:
    """The modules around two names in pairs, the innermost first.

    >>> list(_around("blocks.0.qkv.weight", "layers.0.q.weight"))
    [('blocks.0.qkv', 'layers.0.q'), ('blocks.0', 'layers.0'), ('blocks', 'layers')]
    """
    while "." in name and "." in other:
        name, other = name.rpartition(".")[0], other.rpartition(".")[0]
        yield name, other


def _is_telling(x: Tensor) -> bool:
    """Whether the values of a tensor say which it is: not a bias of zeros, or weights of ones."""
    return x.numel() > 1 and bool((x != x.flatten()[0]).any())


def _groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Two to four parameters of one kind in modules side by side, in their order first, then in others."""
    beside: dict[tuple[str, str], list[str]] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        beside.setdefault((module.rpartition(".")[0], leaf), []).append(name)
    for group in beside.values():
        for count in range(min(len(group), MOST_FUSED), 1, -1):
            for start in range(len(group) - count + 1):
                yield from itertools.permutations(group[start : start + count])


def _put_together(pieces: Sequence[Tensor], dim: int) -> Tensor | None:
    """The pieces put together along a dim; None if they do not fit.  Those without it are equal, or have no meaning."""
    one = pieces[0]
    if one.dim() <= dim:
        return one if all(x.shape == one.shape and torch.equal(x, one) for x in pieces) else None
    rest = one.shape[:dim] + one.shape[dim + 1 :]
    if any(x.dim() != one.dim() or x.dtype != one.dtype or x.shape[:dim] + x.shape[dim + 1 :] != rest for x in pieces):
        return None
    return torch.cat(list(pieces), dim)


def _fused(watch: Watch, fused: Sequence[Fused]) -> Watch:
    """What was seen, with the parts of each fused parameter put together, where the last of them stood."""
    of = {part: one for one in fused for part in one.parts}
    seen: dict[Key, Observation] = {}
    for key, found in watch.seen.items():
        one = of.get(key.name) if key.kind not in _OF_MODULES else None
        if one is None:
            seen[key] = found
            continue
        parts = [watch.seen.get(key._replace(name=part)) for part in one.parts]
        whole = _put_together([x.value for x in parts if x is not None], one.dim) if None not in parts else None
        if whole is None:  # a part without a gradient, say: it is listed as not compared
            seen[key] = found
            continue
        fresh = key._replace(name=one.name)
        seen.pop(fresh, None)
        seen[fresh] = replace(found, value=whole, placements=None)
    return replace(watch, seen=seen)


def _fused_slacks(sides: Sides, fused: Sequence[Fused]) -> dict[Key, Tensor]:
    """How far right values may be away, also those of fused parameters: as far as their parts."""
    slacks = dict(sides.slacks)
    for key in sides.slacks:
        one = next((one for one in fused if key.name == one.parts[0] and key.kind not in _OF_MODULES), None)
        keys = [] if one is None else [key._replace(name=part) for part in one.parts]
        if one is None or any(part not in slacks or part not in sides.reference.seen for part in keys):
            continue
        parts = [slacks[part] for part in keys]
        if all(part.dim() == 0 for part in parts):
            slacks[key._replace(name=one.name)] = torch.stack(parts).amax()
            continue
        spread = [x.expand_as(sides.reference.seen[part].value) for x, part in zip(parts, keys, strict=True)]
        whole = _put_together(spread, one.dim)
        slacks |= {} if whole is None else {key._replace(name=one.name): whole}
    return slacks


def _modules(sides: Sides, found: Mapping[str, str]) -> dict[str, str]:
    """The modules of the ranks whose parameters have the names of another module, and those around them."""
    own = {name for rank in sides.ranks for _, name in rank.calls}
    home = {name for _, name in sides.reference.calls}
    modules: dict[str, str] = {}
    pairs = [(a.rpartition(".")[0], b.rpartition(".")[0]) for a, b in found.items()]
    while pairs:
        pairs = [(a, b) for a, b in dict.fromkeys(pairs) if a != b and a and b and a not in modules]
        for a, b in pairs:
            if a in own and b in home and b not in own and a not in home and b not in modules.values():
                modules[a] = b
        pairs = [(a.rpartition(".")[0], b.rpartition(".")[0]) for a, b in pairs]
    return modules
