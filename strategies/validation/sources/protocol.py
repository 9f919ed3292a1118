"""What a source of rules is: a claimant whose claims the validator tests against real execution.

A `Source` makes claims about samples.  DTensor's registry is one (`sources.dtensor`).  A library that speaks about
functions of plain tensors subclasses `FunctionSource`, which says three things: about which calls it claims something,
which layouts exist and what each means, and which layouts of the results follow from those of the inputs.  The judge is
the same for all: `strategies.validation.probe`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import error_in_one_line
from localtensor.layout import split_axis
from strategies.model.call_signature import with_indexed_tensors
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import OracleResult
from strategies.model.rule import Claim, LocalRun, Rule, Sample
from strategies.model.settings import BadSource
from strategies.validation.probe import Case
from strategies.validation.sources import functions
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.module_samples import home_of
from strategies.validation.sources.script import Sides, Wording, function_script

MOST_TUPLES = 56
"""Tuples of input layouts that are put to a source about one sample on one mesh."""
MOST_SINGLE = 3
"""Tensors of a sample whose gradient is also asked for alone, so that the others take none."""


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """One way in which ranks hold a tensor along one mesh axis.

    `name` is the source's word for it.  `meaning` is how a whole is split into the ranks' pieces and how the pieces make a
    whole again.  `gradient` is the meaning of the gradient's layout; None if the source claims nothing about gradients.
    """

    name: str
    meaning: Placement
    gradient: Placement | None = None

    def __str__(self) -> str:
        return self.name


def replicated() -> NamedLayout:
    """The layout R: the same value on each rank; each rank's gradient is a part of the sum."""
    return NamedLayout("R", Replicate(), Partial())


def sharded(dim: int) -> NamedLayout:
    """The layout S(dim): each rank has a shard of that dim; so is its gradient."""
    return NamedLayout(f"S({dim})", Shard(dim), Shard(dim))


def summed() -> NamedLayout:
    """The layout P: the ranks' values are parts of a sum; the gradient is the same on each rank."""
    return NamedLayout("P", Partial(), Replicate())


class RefusedLayouts(Exception):
    """The source takes no such layouts for this call: no claim, and no fault."""


class SourceRaises(Exception):
    """The source raised another error than its own refusal for a call that plain torch takes."""


class MeaninglessClaim(SourceRaises):
    """The source claims a layout that does not say how the ranks' values make a whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The layouts of a call's tensor results, in order; `local[rank]` are the rank's own non-tensor arguments as text,
    where they differ from the call's; `run` runs all ranks together, for calls that communicate, and `parts` is whether it
    takes parts of sums on another axis."""

    outputs: tuple[NamedLayout | None, ...]
    local: tuple[str, ...] | None = None
    run: LocalRun | None = None
    parts: bool = False


class SampleClaims(Protocol):
    """A source's claims about one sample, mesh size by mesh size."""

    drawn: tuple[int, int] | None
    """Of how many placement tuples how many were drawn, if not all."""
    failures: Sequence[str]
    """What the source raised for calls on the mesh that was asked last, in place of refusing them."""

    def claims(self, ranks: int) -> list[Claim]:
        """The claims on so many ranks.  Raises what the source raises."""
        ...


class Source(Protocol):
    """A claimant.  `title` is its name in sentences; `varied` whether its samples are also tried in other forms."""

    name: str
    title: str
    varied: bool

    def about(self, sample: Sample, oracle: OracleResult, number: int) -> SampleClaims:
        """Its claims about a sample, which is number `number` of its op; `oracle` is the oracle of the sample."""
        ...


class FunctionSource(abc.ABC):
    """A source that speaks about functions of plain tensors.  A subclass sets `name` and defines three methods."""

    name: str
    varied = False
    concatenated = False
    """Whether shards may have any sizes that make the whole; else they are those of torch.chunk."""
    package = ""
    """The package that a user has to install."""

    @property
    def title(self) -> str:
        return self.name

    @abc.abstractmethod
    def calls(self, names: Sequence[str], seed: int) -> Iterable[FunctionCall]:
        """Calls about which the source claims something, whole tensors in them; of these functions, of all if there are
        no names.  Those of one function stand together."""

    @abc.abstractmethod
    def layouts(self, x: Tensor, ranks: int) -> Sequence[NamedLayout]:
        """The layouts that a whole tensor can have along one mesh axis of so many ranks, the replicated one first."""

    def tuples(self, call: FunctionCall, ranks: int) -> list[tuple[NamedLayout, ...]]:
        """The tuples of layouts of a call's tensors to ask about; by default of all that they can have."""
        return layout_tuples([self.layouts(x, ranks) for x in call.tensors])

    def drawn(self, call: FunctionCall, ranks: int) -> tuple[int, int] | None:
        """Of how many tuples of layouts how many are asked about, if not all."""
        return None

    def mesh(self, case: Case) -> tuple[int, ...]:
        """The mesh of real processes that the script of a case runs on."""
        return (case.ranks,)

    @abc.abstractmethod
    def outputs(
        self, call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int
    ) -> Answer | Sequence[NamedLayout | None]:
        """The layouts of the tensor results of a call whose tensors have these layouts.

        Raises `RefusedLayouts` where the source takes no such call, and `SourceRaises` where it fails instead.
        """

    def functions(self) -> Mapping[str, Any]:
        """Every function by its label; by default those of all calls."""
        return {call.label: call.function for call in self._drawn((), 0)}

    def _drawn(self, names: Sequence[str], seed: int) -> Iterator[FunctionCall]:
        """The calls.  Raises `BadSource` where a source of others fails to draw them, or draws something else."""
        try:
            with _asked(self, "calls"):
                for call in self.calls(names, seed):
                    if not isinstance(call, FunctionCall):
                        raise TypeError(f"no FunctionCall: {str(call)[:60]}")
                    yield call
        except SourceRaises as error:
            raise BadSource(self.name, str(error), "Fix that first, or uninstall it.") from error

    def wording(
        self, call: FunctionCall, inputs: Sequence[NamedLayout], outputs: Sequence[NamedLayout | None]
    ) -> Wording:
        """What the scripts of this source's findings have beside the call."""
        shown = f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}"
        home = self._home(call)
        imports = "" if home is None else f"\nfrom {home[0]} import {home[1]}\n"
        return Wording(f"{self.title} claims {call.label}: {shown}", imports)

    def code(self, call: FunctionCall, text: str) -> str:
        """The call in Python, for a script; `text` are its arguments, with `x[0]` for a tensor.

        By default the function by the name that its module, or that of the source, has for it, and where none has, by its label.
        """
        home = self._home(call)
        return f"{call.label if home is None else home[1]}({text})"

    def _home(self, call: FunctionCall) -> tuple[str, str] | None:
        """The module from which a script imports the function, and its name there; None of torch's own, which its label names."""
        if call.label.startswith("torch.") or getattr(call.function, "__module__", None) is None:
            return None
        return home_of(call.function, type(self).__module__)

    def script(self, case: Case, reason: str) -> str:
        """A script that shows a wrong claim on real processes without this package; empty if it is claimed no more."""
        claims = FunctionClaims(self, case.sample, case.oracle)
        for claim in claims.each(case.ranks):
            if str(claim.rule) == str(case.rule):
                inputs, outputs = claims.words[str(claim.rule)]
                text = case.sample.call.args[1]
                local = self.code(claims.call, with_indexed_tensors(claim.local[0].args[1] if claim.local else text))
                whole = "" if claim.run else self.code(claims.call, with_indexed_tensors(text))
                sides = self.on_every_axis(claims.call, claim, case)
                return function_script(
                    case.sample, case.oracle, sides, (whole, local), self.wording(claims.call, inputs, outputs), reason
                )
        return ""

    def on_every_axis(self, call: FunctionCall, claim: Claim, case: Case) -> Sides:
        """The pieces and placements of a case on real processes."""
        return Sides((case.ranks,), [(p,) for p in case.rule.inputs], [(p,) for p in case.rule.outputs], case.held)

    def about(self, sample: Sample, oracle: OracleResult, number: int) -> FunctionClaims:
        return FunctionClaims(self, sample, oracle)

    def names(self, label: str) -> Sequence[str]:
        """Further names by which a user may select a function."""
        return ()

    def without(self, label: str) -> str:
        """Why a function has no samples."""
        return "no call of it could be drawn"

    @functools.cached_property
    def labels(self) -> Mapping[str, str]:
        """The label of each function by the name of its ops.  The functions are registered as ops first."""
        known = self.functions()
        return {functions.register(self.name, label, function): label for label, function in known.items()}

    def samples(self, names: Sequence[str], seed: int) -> Iterator[Sample]:
        """A sample of each call, and one of its gradient where torch has one."""
        known = self.labels
        for label, group in itertools.groupby(self._drawn(names, seed), key=lambda call: call.label):
            for number, call in enumerate(group):
                if label not in known.values():
                    raise BadSource(
                        self.name, f"functions lacks {label}, which calls yields", "List every label there."
                    )
                sample = functions.sample_of(self.name, call)
                if sample is None:
                    continue
                yield sample
                yield from self._gradient_samples(call, sample, number)

    def _gradient_samples(self, call: FunctionCall, sample: Sample, number: int) -> Iterator[Sample]:
        inexact = [i for i, x in enumerate(sample.tensors) if x.is_floating_point() or x.is_complex()]
        alone = [(i,) for i in inexact] if not number and 1 < len(inexact) <= MOST_SINGLE else []
        for wrt in [tuple(inexact), *alone] if inexact else []:
            made = functions.gradient_sample(self.name, call, sample, wrt)
            if made is not None:
                yield made


class FunctionClaims:
    """What a `FunctionSource` claims about one sample of a function or of its gradient."""

    def __init__(self, source: FunctionSource, sample: Sample, oracle: OracleResult) -> None:
        self.source, self.sample, self.oracle = source, sample, oracle
        self.call = functions.function_call(sample, source.labels)
        self.drawn: tuple[int, int] | None = None
        self.failures: list[str] = []
        self.words: dict[str, tuple[Sequence[NamedLayout], Sequence[NamedLayout | None]]] = {}
        """The layouts of each claim, in the source's own words, by its rule."""

    def _fits(self, given: Sequence[Placement], texts: Sequence[str] | None, ranks: int) -> bool:
        """Whether the pieces of the cotangents have the shapes of what each rank's call gives."""
        tensors, count = self.sample.tensors, len(self.call.tensors)
        pieces = [
            [x] * ranks if isinstance(p, Partial) else split_axis(x, p, ranks)
            for x, p in zip(tensors, given, strict=True)
        ]
        for rank in range(ranks):
            text = texts[rank] if texts else self.sample.call.args[1]
            try:
                made = functions.result_traits(
                    self.call.function, [x[rank] for x in pieces[:count]], text, self.sample.call.args[2]
                )
            except REJECTIONS:
                return True  # the judge reports the rank that raises
            shapes = [one.shape for one in made if one.requires_grad]
            if shapes != [tuple(x[rank].shape) for x in pieces[count:]]:
                return False
        return True

    @functools.cached_property
    def _differentiable(self) -> list[int]:
        return functions.differentiable(self.sample)

    def claims(self, ranks: int) -> list[Claim]:
        """The claims, each once."""
        return list(self.each(ranks))

    def each(self, ranks: int) -> Iterator[Claim]:
        """The claims one after the other, as the source is asked."""
        found: set[object] = set()
        self.failures.clear()
        self.drawn = self.source.drawn(self.call, ranks)
        try:
            with _asked(self.source, "layouts"):
                tuples = self.source.tuples(self.call, ranks)
        except SourceRaises as error:
            self.failures.append(str(error))
            return
        for inputs in tuples:
            try:
                answer = self._answer(inputs, ranks)
            except RefusedLayouts:
                continue
            except SourceRaises as error:
                self.failures.append(str(error))
                continue
            claim = self._claim(inputs, answer, ranks)
            if claim is not None and (key := (str(claim.rule), answer.local)) not in found:
                found.add(key)
                yield claim

    def _answer(self, inputs: Sequence[NamedLayout], ranks: int) -> Answer:
        """The source's answer.  Raises `RefusedLayouts`, and `SourceRaises` where a source of others fails or gives none."""
        with _asked(self.source, "outputs"):
            answer = self.source.outputs(self.call, inputs, ranks)
            if isinstance(answer, Answer):
                return answer
            layouts, results = tuple(answer), functions.tensor_results(self.call.whole)
            if len(layouts) != len(results) or not all(isinstance(one, NamedLayout | None) for one in layouts):
                shown = ", ".join(str(one) if isinstance(one, NamedLayout) else repr(one)[:40] for one in layouts)
                raise TypeError(f"not one layout for each of {len(results)} results: {shown}")
            return Answer(layouts)

    def _claim(self, inputs: Sequence[NamedLayout], answer: Answer, ranks: int) -> Claim | None:
        sample, wrt = self.sample, self.call.wrt
        outputs = answer.outputs
        words = f"{', '.join(map(str, inputs))} -> {', '.join('-' if one is None else str(one) for one in outputs)}"
        given = tuple(one.meaning for one in inputs)
        made: tuple[Placement | None, ...] = tuple(None if one is None else one.meaning for one in outputs)
        if wrt:
            cotangents = [outputs[i] for i in self._differentiable]
            if any(one is None or one.gradient is None for one in (*cotangents, *(inputs[i] for i in wrt))):
                return None
            given += tuple(one.gradient for one in cotangents if one is not None and one.gradient is not None)
            made = tuple(inputs[i].gradient for i in wrt)
            if answer.run is None and not self._fits(given, answer.local, ranks):
                return None  # the call itself is judged; its results have no pieces of these sizes
        rule = Rule(sample.op, given, made)
        self.words.setdefault(str(rule), (inputs, outputs))
        if answer.run is not None:
            sizes = self.source.concatenated
            return Claim(rule, words, run=answer.run, parts=answer.parts, concatenated=sizes)
        local = functions.local_calls(sample.call, answer.local) if answer.local else None
        return Claim(rule, words, local, concatenated=self.source.concatenated)


@contextlib.contextmanager
def _asked(source: FunctionSource, method: str) -> Iterator[None]:
    """The block calls a method of a source.  Raises `SourceRaises` where a source of another package fails in it."""
    try:
        yield
    except (RefusedLayouts, SourceRaises, BadSource):
        raise
    except Exception as error:  # why: a source is a package of others, whose code may raise anything
        if type(source).__module__.partition(".")[0] == __name__.partition(".")[0]:
            raise  # a fault of ours is no statement of a claimant
        raise SourceRaises(f"{error_in_one_line(error)}, in {method}") from error


def layout_tuples(choices: Sequence[Sequence[NamedLayout]]) -> list[tuple[NamedLayout, ...]]:
    """The tuples to put to a source: one layout for all tensors, then those with the most replicas first; `MOST_TUPLES`."""
    names = [[one.name for one in row] for row in choices]
    together = [name for name in names[0] if all(name in row for row in names)] if names else []
    found = [tuple(row[own.index(name)] for row, own in zip(choices, names, strict=True)) for name in together]
    for many in range(len(choices) + 1):
        for spots in itertools.combinations(range(len(choices)), many):
            parts = [row[1:] if i in spots else row[:1] for i, row in enumerate(choices)]
            found += itertools.islice(itertools.product(*parts), max(0, 2 * MOST_TUPLES - len(found)))
    unique = {tuple(one.name for one in row): row for row in found}
    return list(unique.values())[:MOST_TUPLES]
