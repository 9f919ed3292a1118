"""The options of `localtensor plan` as values: specs, a price, a topology, a memory limit."""

from __future__ import annotations

import math
import numbers
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from localtensor._util.units import bytes_text, time_text
from localtensor.errors import Refusal
from localtensor.layout import Spec
from strategies.planner.search.metric_check import PriceProbe, probe_price
from strategies.planner.steps.plan import PICO, Move, Price
from strategies.planner.steps.prices import TOPOLOGY, Sent, Time, Topology, TorchPrice
from strategies.planner.steps.topology import RANKS_PER_NODE, cluster_from_json, parse_topology
from strategies.planner.text.parser import read
from strategies.torch_api.user_modules import import_user_module

PRICES = ("time", "bytes", "torch")
DEAREST = 10**30
"""The largest price of a step: the search could not keep sums of a million larger ones apart."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmgtp]?)(i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_LINK = re.compile(r" *([0-9.eE+-]+) *, *([0-9.eE+-]+) *")


class BadPlanOption(Refusal):
    """An invalid option of `localtensor plan`."""

    def __init__(self, option: str, value: str, problem: str, remedy: str, call: str = "plan") -> None:
        super().__init__(call, option, value, problem, remedy)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a plan."""

    src: Spec
    dst: Spec
    by: str
    price: Price
    unit: str
    """`ps`, `bytes`, or empty for integers of a user's own price."""
    topology: Topology
    memory: int | None
    flattened: tuple[tuple[str, ...], ...]

    def price_text(self, price: int) -> str:
        """A price of `unit` in readable form."""
        if self.unit == "ps":
            return time_text(price / PICO)
        return bytes_text(price) if self.unit == "bytes" else f"{price:,}"


def plan_request(
    text: str, *, by: str = "time", topology: str | None = None, inner: str | None = None, outer: str | None = None,
    per_node: int | None = None, memory: str | None = None, flattened: Sequence[str] = (), folder: str = "",
) -> PlanRequest:  # fmt: skip
    """The options as values. Raises `BadPlanText`, `BadTopology` or `BadPlanOption`.

    >>> plan_request("f32[8] @ dp=2: S(0) -> R", memory="2GB").memory
    2000000000
    """
    src, dst = read(text)
    limit = parse_bytes(memory) if memory is not None else None
    sets = tuple(_flattened_names(names, src.mesh.names) for names in flattened)
    links = _topology(src, topology, inner, outer, per_node)
    price, unit = _price(by, src, dst, links, sets, folder)
    return PlanRequest(src, dst, by, price, unit, links, limit, sets)


def parse_bytes(text: str) -> int:
    """The bytes of a size with an optional unit. Raises `BadPlanOption`.

    >>> parse_bytes("2GB"), parse_bytes("1.5 KiB"), parse_bytes("100")
    (2000000000, 1536, 100)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or len(text) > 40 or (found[3] and not found[2]):
        raise BadPlanOption("--memory", ascii(text[:40]), "this is no size", "Write 2GB, 512MB, 1.5GiB, or bytes.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWER[found[2].lower()])


def _flattened_names(names: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names of axes that are flattened into one group."""
    given = tuple(name.strip() for name in names.split(","))
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            remedy = f"Did you mean {near[0]}?" if near else f"The axes are {', '.join(known)}."
            raise BadPlanOption("--flattened", ascii(names[:80]), f"no axis is called {name[:40]!a}", remedy)
    if len(set(given)) != len(given) or len(given) < 2:
        problem = "a group of several axes has two different ones at least"
        example = f"Write --flattened {','.join(known[:2])}."
        remedy = example if len(known) > 1 else "Leave it out on a mesh of one axis."
        raise BadPlanOption("--flattened", ascii(names[:80]), problem, remedy)
    return given


def _topology(spec: Spec, topology: str | None, inner: str | None, outer: str | None, per_node: int | None) -> Topology:
    if topology is not None:
        others = (("--inner", inner), ("--outer", outer), ("--per-node", per_node))
        also = [option for option, value in others if value is not None]
        if also:
            problem = f"it already describes all links and nodes, as {' and '.join(also)} would"
            raise BadPlanOption("--topology", ascii(topology[:80]), problem, "Give the one or the others.")
        return parse_topology(topology).on(spec.mesh)
    if inner is None and outer is None:
        if per_node is not None:
            problem = "it has no effect without links within and between nodes"
            raise BadPlanOption("--per-node", str(per_node), problem, "Add --inner 3,300 --outer 5,25.")
        return TOPOLOGY
    if inner is None or outer is None:
        missing = "--inner" if inner is None else "--outer"
        raise BadPlanOption(missing, "left out", "one link was given, and not the other", f"Add {missing} 5,25.")
    links = {"inner": _link_json("--inner", inner), "outer": _link_json("--outer", outer)}
    ranks_per_node = RANKS_PER_NODE if per_node is None else per_node
    return cluster_from_json({"ranks_per_node": ranks_per_node, **links}).on(spec.mesh)


def _link_json(option: str, text: str) -> dict[str, float]:
    found = _LINK.fullmatch(text)
    try:
        latency, speed = map(float, found.groups()) if found else (math.nan, math.nan)
    except ValueError:
        latency = speed = math.nan
    if math.isnan(latency) or math.isnan(speed):
        problem = "these are not microseconds and gigabytes per second"
        raise BadPlanOption(option, ascii(text[:40]), problem, f"Write {option} 5,25.")
    return {"latency_us": latency, "gigabytes_per_second": speed}


def _price(
    by: str, src: Spec, dst: Spec, topology: Topology, flattened: Sequence[Sequence[str]], folder: str
) -> tuple[Price, str]:
    if by == "time":
        return Time(topology), "ps"
    if by == "bytes":
        return Sent(), "bytes"
    if by == "torch":
        return TorchPrice.of(src.mesh), "ps"
    module, _, function = by.partition(":")
    if not (module and function):
        near = get_close_matches(by, PRICES, 1)
        remedy = f"Did you mean {near[0]}?" if near else "Write time, bytes, torch, or MODULE:FUNCTION."
        raise BadPlanOption("--by", ascii(by[:80]), "there is no such price", remedy)
    found = getattr(import_user_module(module, folder, partial(BadPlanOption, "--by")), function, None)
    if not callable(found):
        problem = f"{module} has no function of that name"
        raise BadPlanOption("--by", ascii(by[:80]), problem, "Write def price(move), which returns seconds.")
    tried = _probed(by, found, (src, dst))
    return tried.price(by), "ps" if tried.seconds else ""


def _probed(by: str, cost: Callable[[Move], object], specs: Sequence[Spec]) -> PriceProbe:
    def ask(cost: Callable[[Move], object], move: Move) -> float:
        try:
            got = cost(move)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # why: the user's function may raise anything, SystemExit included
            first = traceback.format_exception_only(error)[0].partition("\n")[0]  # str(error) may itself raise
            remedy = "Fix that first; it is called with one strategies.planner.steps.plan.Move."
            raise BadPlanOption("--by", by, f"it raises {first[:140]}", remedy) from error
        if isinstance(got, bool) or not isinstance(got, numbers.Real) or not 0 <= _python_number(got) <= DEAREST:
            problem = f"it returns {_short_text(got)} for {move.kind} of {move.nbytes:,} bytes"
            raise BadPlanOption("--by", by, problem, f"Return seconds, or a whole number, from 0 to {DEAREST:.0e}.")
        return _python_number(got)

    tried = probe_price(cost, specs, ask)
    if not tried.searchable:
        odd = tried.odd[0]
        problem = f"no plan can be searched by it, since {odd.what}: {odd.got:g} for {odd.where}"
        raise BadPlanOption("--by", by, problem, "Let it depend on the move alone.")
    return tried


def _python_number(got: numbers.Real) -> int | float:
    """The number as an int or a float; an integer is never rounded and may have any size."""
    return int(got) if isinstance(got, numbers.Integral) else float(got)


def _short_text(value: object) -> str:
    """The value in an error message, shortened: an integer may have any length."""
    if isinstance(value, int) and abs(value) > DEAREST:
        return f"{'more' if value > 0 else 'less'} than {DEAREST if value > 0 else -DEAREST:.0e}"
    return ascii(value)[:60]


def parse_sizes(option: str, text: str, call: str) -> tuple[int, ...]:
    """Comma-separated integers. Raises `BadPlanOption`.

    >>> parse_sizes("--mesh", "2,2", "localtensor cost check")
    (2, 2)
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        example = "8,8" if option == "--shape" else "2,2"
        raise BadPlanOption(option, ascii(text[:40]), "these are no sizes", f"Write {option} {example}.", call)
    return tuple(map(int, parts))
