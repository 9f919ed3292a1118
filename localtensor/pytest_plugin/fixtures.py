"""Fixtures in ranks: `rank`, `mesh` and the fixtures that use them are deferred at setup, and made in each rank.

Ordinary fixtures are set up once, by pytest, and all ranks share their values, except for tensors and the like.  `World`
and `Comms` are the values of the fixtures `world` (rank programs from ordinary tests) and `comms` (the event log).

pytest's private parts (for: tried on 9.0, 9.2):
    _fixtureinfo.name2fixturedefs    which fixtures a test asks for, through others: no public list has overrides
    FixtureDef.cached_result         what pytest_fixture_setup has to leave, or pytest sets the fixture up itself
    FixtureDef.cache_key             the key beside that value
    FixtureRequest._pyfuncitem       whose test a request serves, whatever the scope of the fixture
    SubRequest._fixturedef           which fixture asks by request.getfixturevalue
"""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from localtensor.pytest_plugin.marks import RANKS, SessionSettings

if TYPE_CHECKING:
    from localtensor._util.events import Call
    from localtensor.runner.api import Run

OURS = "localtensor.pytest_plugin"  # defines these fixtures; one of a user's may have the same name
PER_RANK = frozenset({"rank", "world_size", "mesh", "comms"})
Await = Callable[[Coroutine[Any, Any, Any]], Any]


def is_own_fixture(definition: pytest.FixtureDef[Any]) -> bool:
    return getattr(definition.func, "__module__", None) == OURS


@dataclass(frozen=True, slots=True)
class RequestedFixtures:
    """The requests of a test: names of our fixtures, and a fixture of wide scope that requests one of each rank."""

    ours: frozenset[str]
    wide: tuple[str, str, str] | None  # fixture, scope, the requested fixture


def requested_fixtures(item: pytest.Function) -> RequestedFixtures:
    """The fixtures that a test requests, also through fixtures, except by request.getfixturevalue."""
    definitions: Mapping[str, Sequence[pytest.FixtureDef[Any]]] = item._fixtureinfo.name2fixturedefs
    ours: set[str] = set()
    wide: list[tuple[str, str, str]] = []
    known: dict[tuple[str, int], str | None] = {}

    def visit(name: str, depth: Mapping[str, int]) -> str | None:
        """The per-rank fixture that this one needs, if any; a fixture that requests its own name gets the next."""
        level = depth.get(name, 1)
        if (name, level) in known or level > len(definitions.get(name, ())):
            return known.get((name, level))
        known[name, level] = None
        definition = definitions[name][-level]
        if is_own_fixture(definition):
            ours.add(name)
            needs = name if name in PER_RANK else None
        else:
            found = [visit(other, {**depth, name: level + 1}) for other in definition.argnames]
            needs = next(filter(None, found), None)
            if needs and definition.scope != "function":
                wide.append((name, definition.scope, needs))
        known[name, level] = needs
        return needs

    for name in item.fixturenames:
        visit(name, {})
    return RequestedFixtures(frozenset(ours), wide[0] if wide else None)


def shadowing_notes(item: pytest.Function) -> list[str]:
    """A note for each fixture of the user that hides a per-rank fixture of the same name."""
    definitions: Mapping[str, Sequence[pytest.FixtureDef[Any]]] = item._fixtureinfo.name2fixturedefs
    found = [definitions[name][-1] for name in sorted(PER_RANK) if definitions.get(name) and name in item.fixturenames]
    return [
        f"Note: the fixture {one.argname} is that of {one.func.__module__}, which comes before localtensor's."
        for one in found
        if not is_own_fixture(one) and not one.func.__module__.startswith("_pytest.")
    ]


class DeferredFixture:
    """Placeholder of a fixture that is made in each rank; `needs` are the values of the fixtures that it requests.

    No dataclass: Hypothesis would print its fields as an argument of the test.
    """

    __slots__ = ("definition", "needs")

    def __init__(self, definition: pytest.FixtureDef[Any], needs: Mapping[str, Any]) -> None:
        self.definition, self.needs = definition, needs

    def __repr__(self) -> str:
        return f"<{self.definition.argname}: a value in each rank>"


def defer_fixture(definition: pytest.FixtureDef[Any], request: Any, *, has_log: bool) -> DeferredFixture | None:
    """The placeholder of a fixture that depends on the rank, else None; `has_log`: whether there is an event log."""
    needs = {name: request.getfixturevalue(name) for name in definition.argnames}
    per_rank = is_own_fixture(definition) and definition.argname in PER_RANK
    if not per_rank and not any(isinstance(value, DeferredFixture) for value in needs.values()):
        return None
    stand_in = DeferredFixture(definition, needs)
    problem = _refusal_of(definition, request, has_log=has_log)
    if problem is None:
        definition.cached_result = (stand_in, definition.cache_key(request), None)
        return stand_in
    refusal = pytest.fail.Exception(problem, pytrace=False)
    definition.cached_result = (None, definition.cache_key(request), (refusal, None))
    raise refusal


def _refusal_of(definition: pytest.FixtureDef[Any], request: pytest.FixtureRequest, *, has_log: bool) -> str | None:
    name = definition.argname
    if name == "comms" and not has_log:
        return "comms: real processes keep no event log. Run this test with --ranks-on threads."
    asking = getattr(getattr(request, "_parent_request", None), "_fixturedef", None)
    if asking is None or name in asking.argnames:
        return None
    return (
        f"fixture {asking.argname}: request.getfixturevalue: {name!r}: it has a value in each rank, and this fixture is "
        f"set up once, before there are ranks. Name {name} among its arguments."
    )


class RankFixtures:
    """The fixtures of one rank, made in its thread and in pytest's order; torn down in the other order."""

    def __init__(
        self, base: Mapping[str, Callable[[], Any]], instance: object, run: Await, copied: Callable[[Any], Any]
    ) -> None:
        """`base` makes the per-rank fixtures by name; `copied` copies a value that pytest set up once for this rank."""
        self.instance = instance
        self._base, self._run, self._copied = base, run, copied
        self._values: dict[DeferredFixture, Any] = {}
        self._finalizers: list[Callable[[], Any]] = []

    def of(self, value: object) -> Any:
        """The value of this rank where pytest has `value`."""
        __tracebackhide__ = True
        if isinstance(value, DeferredFixture):
            if value not in self._values:
                self._values[value] = self._make(value)
            return self._values[value]
        return RankRequest(value, self) if isinstance(value, pytest.FixtureRequest) else self._copied(value)

    def _make(self, fixture: DeferredFixture) -> Any:
        __tracebackhide__ = True
        definition = fixture.definition
        if is_own_fixture(definition):
            return self._base[definition.argname]()
        needs = {name: self.of(value) for name, value in fixture.needs.items()}
        function = self._bound(definition.func)
        made = function(**needs)
        if inspect.isgenerator(made):
            value = _first_value(made, definition.argname)
            self.add_finalizer(lambda: _finish_generator(made, definition.argname))
            return value
        if inspect.isasyncgen(made):
            value = self._run(_first_async_value(made))
            self.add_finalizer(lambda: self._run(_finish_async_generator(made)))
            return value
        return self._run(made) if inspect.iscoroutine(made) else made

    def _bound(self, function: Any) -> Any:
        """The function of a fixture; a method is bound to this rank's own instance."""
        owner = getattr(function, "__self__", None)
        if self.instance is None or owner is None or not isinstance(self.instance, type(owner)):
            return function
        return function.__func__.__get__(self.instance)

    def add_finalizer(self, finalizer: Callable[[], Any]) -> None:
        self._finalizers.append(finalizer)

    @property
    def unfinished(self) -> bool:
        return bool(self._finalizers)

    def finish(self) -> list[BaseException]:
        """Runs all finalizers, the last first; returns what they raised."""
        errors: list[BaseException] = []
        while self._finalizers:
            try:
                self._finalizers.pop()()
            except BaseException as error:  # why: each finalizer runs, whatever the others raise
                errors.append(error)
        return errors


class RankRequest:
    """pytest's request in a rank: values that depend on the rank are those of this rank."""

    def __init__(self, request: pytest.FixtureRequest, fixtures: RankFixtures) -> None:
        self._request, self._fixtures = request, fixtures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def instance(self) -> Any:
        return self._fixtures.instance

    def getfixturevalue(self, argname: str) -> Any:
        return self._fixtures.of(self._request.getfixturevalue(argname))

    def addfinalizer(self, finalizer: Callable[[], Any]) -> None:
        self._fixtures.add_finalizer(finalizer)

    def __repr__(self) -> str:
        return f"<in a rank: {self._request!r}>"


def _first_value(made: Iterator[object], name: str) -> object:
    try:
        return next(made)
    except StopIteration:
        raise ValueError(f"{name} did not yield a value") from None


def _finish_generator(made: Iterator[object], name: str) -> None:
    for _ in made:
        pytest.fail(f"fixture {name} has more than one 'yield'", pytrace=False)


async def _first_async_value(made: AsyncIterator[object]) -> object:
    return await made.__anext__()


async def _finish_async_generator(made: AsyncIterator[object]) -> None:
    async for _ in made:
        pytest.fail("an async fixture has more than one 'yield'", pytrace=False)


__tracebackhide__ = True  # a failure is shown at the line that called `world.run`


class World:
    """Runs functions on ranks, with the session's options as defaults."""

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._log: Sequence[Call] | str = "world.run was not called yet"

    def run(self, fn: Callable[..., Any], *args: object, ranks: int | None = None, **overrides: object) -> "Run":
        """Runs `fn(*args)` on each rank, as `localtensor.run`: on `ranks` ranks, else on those of `--ranks`, else on 2.

        `overrides` are keywords of `localtensor.run`: on, schedule, seed, timeout, device, leftovers, share.  Raises
        the errors of `localtensor.run`.
        """
        from localtensor.errors.base import LocalTensorError
        from localtensor.pytest_plugin.assertions import trim_traceback
        from localtensor.runner import api as _run

        settings = self._settings
        options: dict[str, Any] = {"on": settings.on, "schedule": settings.schedule, "seed": settings.seed or 0}
        options["leftovers"] = settings.leftovers or "ignore"
        if settings.timeout is not None:
            options["timeout"] = settings.timeout or None
        options.update(overrides)
        self._log = "the run has not ended"
        try:
            run = _run.run(fn, *args, ranks=settings.ranks or RANKS if ranks is None else ranks, **options)
        except LocalTensorError as fault:
            self._log = getattr(fault, "log", ())
            if fault.__cause__ is not None:
                trim_traceback(fault.__cause__)
            raise trim_traceback(fault) from fault.__cause__
        self._log = run.calls if options["on"] == "threads" else "real processes keep no event log"
        return run

    @property
    def calls(self) -> "Sequence[Call]":
        """The calls of the ranks of the last run."""
        if isinstance(self._log, str):
            pytest.fail(f"comms: {self._log}. Read it after a world.run on rank threads.", pytrace=False)
        return self._log


class Comparer:
    """localtensor.compare, with the session's options as defaults."""

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As localtensor.compare."""
        import localtensor  # lazy: without torch until a test asks for it

        return self._compared(localtensor.compare, args, options)

    def functions(self, *args: Any, **options: Any) -> Any:
        """As localtensor.compare_functions."""
        import localtensor  # lazy: without torch until a test asks for it

        return self._compared(localtensor.compare_functions, args, options)

    def _compared(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        from localtensor.errors.base import LocalTensorError
        from localtensor.pytest_plugin.assertions import trim_traceback

        defaults = {"on": self._settings.on, "seed": self._settings.seed or 0}
        try:
            return function(*args, **{**defaults, **options})
        except LocalTensorError as fault:
            raise trim_traceback(fault) from fault.__cause__
