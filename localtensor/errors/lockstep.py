"""Errors of lockstep mode: a branch on values that differ between ranks, and tensors from outside of the mode."""

import linecache
from collections.abc import Iterable, Mapping

from localtensor._util.events import Place
from localtensor.errors import base

MOST_IN_SENTENCE = 4  # values; more of them have a line each
LONGEST_SOURCE = 100  # characters of the source line
_OWN_FLOW = "Run the function by localtensor.run(fn, ranks=...), where each rank has a control flow of its own"
_WITHOUT_BRANCH = "by torch.where, or by torch.sym_max, sym_min or sym_ite for ints"


class RanksDiverge(base.Refusal):
    """A value that must be the same on all ranks of one control flow differs; `values` holds it by rank.

    `what` is the condition in words, or empty; the user's line is quoted if its file can be read.
    """

    def __init__(self, call: str, what: str, values: Mapping[int, object], place: Place | None = None) -> None:
        self.values, self.place = dict(values), place
        facts = {rank: base.first_line(repr(value), 60) for rank, value in values.items()}
        kinds = base.minority_first(facts)
        many = len(kinds) > MOST_IN_SENTENCE
        source = _source(place)
        shown = f"{len(kinds)} values on {base.rank_names(facts)}" if many else base.facts_by_rank(facts)
        problem = f"all ranks share one control flow, and it needs one value{base.place_suffix(place)}"
        problem += f", `{source}`" if source else ""
        remedy = f"{_OWN_FLOW}, or choose without a branch: {_WITHOUT_BRANCH}."
        lines = base.merge_equal_lines(facts.items()) if many else []
        super().__init__(call, what or "value", shown, problem, "\n".join([remedy, *lines]))


class OutsideWrite(base.Refusal):
    """An op writes values that differ by rank into a tensor that all ranks share; `shown` is its short form."""

    def __init__(self, op: str, place: Place | None, shown: str) -> None:
        self.place = place
        problem = "it was made outside the mode and is one tensor for all ranks, whose values for it differ"
        remedy = "Make it inside the mode, or write to a clone of it that is made there."
        super().__init__(op, "the tensor written", f"{shown}{base.place_suffix(place)}", problem, remedy)


class AnotherMode(base.Refusal):
    """A tensor of one LocalTensorMode is used in another."""

    def __init__(self, op: str, place: Place | None = None) -> None:
        self.place = place
        problem = "it belongs to another LocalTensorMode, and each mode has ranks of its own"
        remedy = "Make it in the mode in which it is used."
        super().__init__(op, "an input", f"used{base.place_suffix(place) or ' here'}", problem, remedy)


class NoMode(base.Refusal):
    """A function that needs a LocalTensorMode is called outside of any."""

    def __init__(self, call: str, place: Place | None = None) -> None:
        self.place = place
        problem = "no LocalTensorMode is entered in this thread, so there are no ranks"
        remedy = "Call it inside `with LocalTensorMode(ranks):`."
        super().__init__(call, "mode", f"called{base.place_suffix(place) or ' here'}", problem, remedy)


class NotHeld(base.Refusal):
    """A value is requested of ranks that hold none."""

    def __init__(self, call: str, ranks_missing: Iterable[int], ranks_held: Iterable[int]) -> None:
        missing, held = sorted(ranks_missing), sorted(ranks_held)
        problem = f"no value is held there, {f'only on {base.rank_names(held)}' if held else 'nor anywhere else'}"
        remedy = "Name only ranks that hold one, or make the value on all ranks that are to have it."
        super().__init__(call, "ranks", base.rank_names(missing), problem, remedy)


class NotInLockstep(base.Refusal, call="LocalTensorMode", argument="ranks in lockstep"):
    """Something that one control flow for all ranks cannot do; `why` is a clause."""

    REMEDY = f"{_OWN_FLOW}."


class ValuesDiffer(base.Refusal, values="{mine} on rank {rank}, {theirs} on rank {other}"):
    """The tensors of two ranks that are offered for one LocalTensor differ in `argument`: dtype, device and the like."""

    PROBLEM = "one LocalTensor has one dtype, device, layout and number of dims for all ranks"
    REMEDY = "Give all ranks the same {argument} first."


class NotATensor(base.Refusal, argument="value", values="a {kind} on rank {rank}"):
    """A rank's value for a LocalTensor is no tensor."""

    PROBLEM = "each rank's value of a LocalTensor is a tensor"
    REMEDY = "Give a torch.Tensor for each rank."


class ModeBusy(
    base.Refusal, call="LocalTensorMode", argument="simulation", values="a second one while the first is at work"
):
    """Two simulations at once; `problem` is a clause that says which."""

    REMEDY = "Let the first end before the second."


def _source(place: Place | None) -> str:
    """The source line at a place; empty if the file cannot be read."""
    return "" if place is None else base.first_line(linecache.getline(place.file, place.line), LONGEST_SOURCE)
