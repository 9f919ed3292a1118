"""The base classes of all errors, the five parts of a message, and the formats that messages share.

The parts are: the call, the argument, its values in short form, the problem, the remedy.  `refusal_sentence` joins them in that
order; `Refusal` is the base of the classes whose message is that sentence alone, so that no part can be missing.

A `ProgramFault` is a fault of the user's program: that sentence, then a line for each rank or group of ranks.  Ranks
with equal facts share a line, and a list stops at two dozen lines; the attributes of the error hold everything.

The last classes of this module are refusals of what a caller writes: placements, meshes, dims, pieces.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from string import Formatter
from typing import Any, ClassVar

from localtensor._util import ambient
from localtensor._util.events import Call, Place, Wait, Waiting


class LocalTensorError(Exception):
    """Base of all errors that this project raises on purpose.

    Not a `TypeError` or `ValueError`: operator dispatch and pytest's own machinery catch those.  Refusals of what torch
    itself refuses with a `RuntimeError` are such an error as well, so that programs catch them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the text and the attributes, so that the arguments of the class do not matter."""
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[LocalTensorError], args: tuple[object, ...], attributes: dict[str, object]) -> LocalTensorError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def refusal_sentence(call: str, argument: str, values: str, problem: str, remedy: str) -> str:
    """One sentence of five parts.

    >>> refusal_sentence("split", "dim", "dim=2 of (4, 4)", "there is no dim 2", "Use 0 or 1.")
    'split: dim: dim=2 of (4, 4): there is no dim 2. Use 0 or 1.'
    """
    return f"{call}: {argument}: {short_form(values)}: {problem}. {remedy}"


MOST_VALUES = 1000  # characters: more than any path or call that a message has to show whole


def short_form(values: str) -> str:
    """The values of a message in at most `MOST_VALUES` characters: of a longer text the begin and the end.

    >>> short_form("ab"), len(short_form("a" * 100_000))
    ('ab', 1000)
    """
    return values if len(values) <= MOST_VALUES else f"{values[: MOST_VALUES - 203]}...{values[-200:]}"


class Refusal(LocalTensorError):
    """An error whose message is one sentence of five parts.

    A class states the parts that are the same in all its messages, with names in braces for the facts of a case: the
    first three parts in its header, `PROBLEM` and `REMEDY` in its body.  The constructor takes the facts, and the parts
    that the class leaves open, in the order in which the sentence first names them.  A class has a constructor of its
    own where facts are computed, are optional, or are kept as attributes.

    >>> class NoSuchPage(Refusal, argument="page", values="page {number} of {pages}"):
    ...     PROBLEM = "there is no page {number}"
    >>> print(NoSuchPage("print", 7, 5, "Name one up to 5."))
    print: page: page 7 of 5: there is no page 7. Name one up to 5.
    """

    SUBJECT: ClassVar[str] = "{call}: {argument}: {values}"
    PROBLEM: ClassVar[str] = "{problem}"
    REMEDY: ClassVar[str] = "{remedy}"
    NOTED: ClassVar[bool] = (
        False  # by the LocalTensorMode of this thread: a program that catches it goes on as no rank does
    )

    def __init_subclass__(
        cls, call: str = "{call}", argument: str = "{argument}", values: str = "{values}", *, noted: bool = False
    ) -> None:
        cls.NOTED = noted or cls.NOTED
        cls.SUBJECT = cls.SUBJECT.replace("{call}", call).replace("{argument}", argument).replace("{values}", values)

    def __init__(self, *facts: object) -> None:
        sentence = f"{self.SUBJECT}: {self.PROBLEM}. {self.REMEDY}"
        names = dict.fromkeys(name for _, name, _, _ in Formatter().parse(sentence) if name)
        subject = {name for _, name, _, _ in Formatter().parse(self.SUBJECT)}
        given = dict(zip(names, facts, strict=True))
        short = {n: short_form(v) if isinstance(v, str) and n in subject else v for n, v in given.items()}
        super().__init__(sentence.format(**short))
        if self.NOTED:
            ambient.note_error(self, "a refusal")


REPLAY_LINE = 200  # characters: one or two lines of a terminal, which can be copied whole
MOST_LINES = 24
LARGE_GROUP = 8  # ranks; those of a larger group are printed as ranges


class ProgramFault(LocalTensorError):
    """A fault of the user's program.

    `places` are the lines of that program which the message names, the likely culprit's first; `ranks` are the ranks
    that are concerned.  `replay` is the schedule that repeats the fault, or None; `log` holds the calls of all ranks,
    where a log was kept.
    """

    def __init__(
        self, sentence: str, details: Iterable[str], places: Iterable[Place | None], ranks: Iterable[int]
    ) -> None:
        self.places: tuple[Place, ...] = tuple(dict.fromkeys(place for place in places if place is not None))
        self.ranks: tuple[int, ...] = tuple(dict.fromkeys(ranks))
        self.replay: str | None = None
        self.log: tuple[Call, ...] = ()
        super().__init__("\n".join([sentence, *details]))

    def __str__(self) -> str:
        if self.replay is None:
            return super().__str__()
        line = f"Replay: {self.replay}"
        if len(line) > REPLAY_LINE or "\n" in line:
            line = f"Replay: {len(self.replay)} characters, too many for this line: see .replay of this error"
        return f"{super().__str__()}\n{line}"


def rank_names(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> rank_names([1]), rank_names([3, 0, 2]), rank_names([0, *range(2, 256)])
    ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 2-255')
    """
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) != 1 else ''} {rank_ranges(ordered)}"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Numbers in order, where four or more in a row are a range.

    >>> rank_ranges([0, 1, 2, 7, 8, 9, 10])
    '0, 1, 2, 7-10'
    """
    rows = [[rank for _, rank in row] for _, row in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 3 else ", ".join(map(str, row)) for row in rows)


def first_line(text: str, most: int = 200) -> str:
    """The first line of a text that is not blank, cut to `most` characters.

    >>> first_line("abcdefgh", 6)
    'abc...'
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else f"{line[: most - 3]}..."


def error_in_one_line(error: BaseException, most: int = 200) -> str:
    """The type of an error, and the first line of its message, which is cut to `most` characters.

    >>> error_in_one_line(ValueError("odd, since ...")), error_in_one_line(KeyError())
    ('ValueError: odd, since ...', 'KeyError: -')
    """
    return f"{type(error).__name__}: {first_line(str(error), most) or '-'}"


def place_suffix(place: Place | None) -> str:
    """The place as the end of a phrase, ` at a.py:7 in f`; empty for None."""
    return f" at {place}" if place else ""


def call_summary(call: Call) -> str:
    """A call in short form, with its place.

    >>> call_summary(Call(0, "recv", "0", (0, 1), 2, peer=1, tag=5, place=Place("a.py", 7, "f")))
    'recv #2 from 1 with tag 5 at a.py:7 in f'
    """
    name = f"{call.kind} #{call.number}"
    if call.peer is None:
        name += f" in group {call.group_name}"
    else:
        name += f" {'from' if 'recv' in call.kind or 'wait' in call.kind else 'to'} {call.peer}"
    tag = f" with tag {call.tag}" if call.tag else ""
    handling = f", while handling {call.handling}" if call.handling else ""
    return f"{name}{tag}{place_suffix(call.place)}{handling}"


def call_text_without_rank(call: Call) -> str:
    """The text of a call without its rank; the ranks of a large group are printed as ranges."""
    text = str(call).partition(": ")[2]
    if len(call.group) <= LARGE_GROUP:
        return text
    return text.replace(f"(ranks {', '.join(map(str, call.group))})", f"(ranks {rank_ranges(call.group)})")


def merge_equal_lines(lines: Iterable[tuple[int, str]], one: str = ": ", more: str | None = None) -> list[str]:
    """Lines of ranks, where ranks with the same text share one, in the place of the first.

    `one` and `more` join the ranks and the text: for one rank, and for several.

    >>> merge_equal_lines([(1, "recv"), (0, "send"), (2, "send")])
    ['  rank 1: recv', '  ranks 0, 2: send']
    """
    who: dict[str, list[int]] = {}
    for rank, text in lines:
        if rank not in who.setdefault(text, []):
            who[text].append(rank)
    joins = (one, one if more is None else more)
    return truncate_lines([f"  {rank_names(ranks)}{joins[len(ranks) > 1]}{text}" for text, ranks in who.items()])


def call_lines(calls: Iterable[Call]) -> list[str]:
    """A line for each call; equal calls of several ranks share one."""
    return merge_equal_lines((call.rank, call_text_without_rank(call)) for call in calls)


def last_collective_lines(calls: Sequence[Call]) -> list[str]:
    """The previous calls of the ranks, under a heading; empty if there are none."""
    return ["Last collectives:", *call_lines(calls)] if calls else []


def wait_lines(waits: Iterable[Wait]) -> list[str]:
    """The wait graph: a line for each rank; ranks that wait for the same share one."""
    ordered = sorted(waits, key=lambda wait: wait.rank)
    lines = [(wait.rank, f"{rank_names(wait.ranks)} in {call_summary(wait.call)}") for wait in ordered]
    return merge_equal_lines(lines, " waits for ", " wait for ")


def busy_lines(busy: Iterable[Waiting]) -> list[str]:
    """The places at which real processes were ended: a line for each rank; ranks at the same place share one."""
    return merge_equal_lines(((one.rank, one.where) for one in busy), " was at ", " were at ")


def truncate_lines(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    """The first `most` lines, and the number of the others."""
    over = len(lines) - most
    return [*lines[:most], f"  and {over} lines more"] if over > 1 else list(lines)


def minority_first(facts: Mapping[int, object]) -> list[tuple[object, list[int]]]:
    """Each fact and its ranks, in rank order; the rarest fact first, and of two as rare that of the lower rank.

    >>> minority_first({0: "sum", 1: "max", 2: "sum"})
    [('max', [1]), ('sum', [0, 2])]
    """
    who: dict[object, list[int]] = {}
    for rank in sorted(facts):
        who.setdefault(facts[rank], []).append(rank)
    return sorted(who.items(), key=lambda item: len(item[1]))


def facts_by_rank(facts: Mapping[int, object]) -> str:
    """Facts and their ranks in one phrase, the rarest first.

    >>> facts_by_rank({0: "sum", 1: "max", 2: "sum"})
    'max on rank 1, sum on ranks 0, 2'
    """
    phrases = [f"{fact} on {rank_names(ranks)}" for fact, ranks in minority_first(facts)]
    return ", ".join(phrases[:4]) + (f" and {len(phrases) - 4} others" if len(phrases) > 4 else "")


def likely_culprit_lines(facts: Mapping[int, object]) -> list[str]:
    """A line that names the ranks that differ, if more than half of the ranks agree; else nothing.

    >>> likely_culprit_lines({0: "sum", 1: "max", 2: "sum"}), likely_culprit_lines({0: "sum", 1: "max"})
    (['Likely culprit: rank 1; ranks 0, 2 agree.'], [])
    """
    [(fact, count)] = Counter(facts.values()).most_common(1)
    others = [rank for rank in facts if facts[rank] != fact]
    if 2 * count <= len(facts) or not others:
        return []
    most = [rank for rank in facts if facts[rank] == fact]
    return [f"Likely culprit: {rank_names(others)}; {rank_names(most)} agree."]


MOST_SHAPES = 8  # in a message; with more ranks, the first that differs is named


class BadPlacement(Refusal):
    """A placement that cannot be read, or that the tensor cannot have."""

    def __init__(self, call: str, text: str, problem: str, remedy: str = "") -> None:
        usual = "Write R, S(0), SS(0,2), P(sum), P(avg), P(min), P(max), P(product), or pass torch's own placement."
        super().__init__(call, "placement", repr(text), problem, remedy or usual)


class BadMesh(Refusal):
    """Mesh sizes or names that make no mesh, or an axis, rank or place that a mesh does not have."""

    def __init__(self, call: str, values: str, problem: str, argument: str = "mesh", remedy: str = "") -> None:
        usual = "Give each axis a size of at least 1 and a name of its own, as in Mesh.of(dp=2, tp=4)."
        super().__init__(call, argument, values, problem, remedy or usual)


class NoSuchDim(Refusal):
    """A tensor dim that the shape does not have."""

    def __init__(self, call: str, dim: int, shape: Sequence[int]) -> None:
        have = f"dims 0 to {len(shape) - 1}" if shape else "no dims"
        problem = f"a tensor of {len(shape)} dims has {have}"
        super().__init__(call, "dim", f"dim={dim} of shape {tuple(shape)}", problem, "Name one of those dims.")


class WrongPieces(Refusal):
    """The ranks' pieces do not make up one tensor of the spec's shape."""

    def __init__(self, call: str, got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> None:
        values, problem = f"pieces of shapes {_shape_list(got)}", f"the spec asks for {_shape_list(want)}"
        odd = [rank for rank, (mine, theirs) in enumerate(zip(got, want, strict=False)) if tuple(mine) != tuple(theirs)]
        if odd and len(got) > MOST_SHAPES:
            problem += f", {tuple(want[odd[0]])} and not {tuple(got[odd[0]])} of rank {odd[0]}"
        super().__init__(call, "pieces", values, problem, "Give rank i the piece that split gives it.")


class WrongType(Refusal, TypeError):
    """An argument of another type than the call takes."""

    def __init__(self, call: str, argument: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(call, argument, first_line(repr(value), 60), problem, remedy)


class WrongShape(WrongPieces):
    """A tensor that is to be split by a spec of another shape."""

    def __init__(self, call: str, got: Sequence[int], want: Sequence[int]) -> None:
        remedy = "Pass a tensor of that shape, or a spec of this one."
        problem = f"the spec is of shape {tuple(want)}"
        Refusal.__init__(self, call, "x", f"shape {tuple(got)}", problem, remedy)


def _shape_list(shapes: Sequence[Sequence[int]]) -> str:
    over = len(shapes) - MOST_SHAPES
    shown = ", ".join(str(tuple(shape)) for shape in shapes[:MOST_SHAPES])
    return f"[{shown} and {over} more]" if over > 0 else f"[{shown}]"


class NotReducible(Refusal, argument="placement", values="P({kind}) of {dtype}"):
    """A partial value of this dtype has no meaning under this reduction."""

    PROBLEM = "{kind} of {dtype} is not defined"
    REMEDY = "Choose another dtype or reduction."


class BadShardOrder(Refusal, call="Spec", argument="shard_order"):
    """A shard order that names other axes than those that cut a dim."""

    REMEDY = "Give each such dim once, with the axes that cut it, as in ((0, (1, 0)),), or pass shard_order=()."


class OtherRows(Refusal, argument="spec"):
    """A spec that has no other form in which each rank holds the same rows."""
