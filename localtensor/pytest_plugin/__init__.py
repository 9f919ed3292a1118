"""The pytest plugin: test bodies that run as rank programs.  Loading it imports neither torch nor numpy.

    @pytest.mark.ranks(4)                   the body runs on 4 ranks; (2, 4, 8) makes a test of each
    @pytest.mark.mesh((2, 2))               on a mesh of 2 x 2 ranks
    rank, world_size, mesh, comms           fixtures with a value in each rank
    comms_snapshot                          `assert comms == comms_snapshot`: as in the file that --rank-snapshots update wrote
    world                                   runs functions on ranks from an ordinary test
    compare                                 localtensor.compare, with the session's options as defaults

Options and ini settings of the same names are under `pytest --help`.
"""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

from localtensor.pytest_plugin import comms as comms_fixtures
from localtensor.pytest_plugin import fixtures
from localtensor.pytest_plugin import marks as rank_marks

_RANKS_PARAMETER = "_ranks"  # the parameter of a test with several numbers of ranks
_TEST = pytest.StashKey[Any]()
_REFUSED = pytest.StashKey[str]()
_OURS = fixtures.PER_RANK | {"world"}
_OPTIONS: dict[str, tuple[str, str, rank_marks.Check, str]] = {
    # setting: option, metavar, check, help
    "ranks": ("--ranks", "N", rank_marks.check_ranks, (
              "run tests that ask for rank, world_size, mesh or comms on N ranks; "
              "@pytest.mark.ranks without a number takes N too (2 without this option)")),
    "on": ("--ranks-on", "|".join(rank_marks.RANK_BACKENDS), rank_marks.check_backend, (
           "what ranks are: threads of this process, one at a time (default), or processes over gloo or NCCL")),
    "schedule": ("--rank-schedule", "TEXT", rank_marks.check_schedule, (
                 "the order in which rank threads run: round_robin (default), shuffled:7, pct:7, "
                 "or the text that a failure prints to repeat it")),
    "seed": ("--rank-seed", "N", rank_marks.check_seed, "the seed of every rank's random generators (0)"),
    "flaky": ("--rank-flaky", "N", rank_marks.check_flaky,
              "run each rank test under N schedules, up to the first that it fails under"),
    "timeout": ("--rank-timeout", "SECONDS", rank_marks.check_timeout,
                "for one run of all ranks of a test; 0 is no limit (300)"),
    "leftovers": ("--rank-leftovers", "|".join(rank_marks.LEFTOVERS), rank_marks.check_leftovers, (
                  "what becomes of process groups that a test made and did not destroy: "
                  "nothing (default), a warning, or a failure")),
    "trace": ("--rank-trace", "DIR", rank_marks.check_folder, (
              "write a trace of the ranks of each rank test into DIR, for Perfetto or chrome://tracing")),
    "snapshots": ("--rank-snapshots", "check|update", comms_fixtures.check_snapshots,
                  "what comms_snapshot does with its files: compare with them (default), or write them"),
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "distributed tests on simulated ranks (localtensor)")
    for name, (option, metavar, _, words) in _OPTIONS.items():
        group.addoption(option, metavar=metavar, default=None, dest=f"localtensor_{name}", help=words)
        parser.addini(_ini_name(option), f"as {option}: {words}", default=None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*numbers, schedule=None, schedules=1, seed=None, timeout=None, leftovers=None): the test body runs as a "
        "rank program on so many ranks; several numbers make a test of each, and none takes --ranks; it runs under so "
        "many schedules, up to the first that it fails under (localtensor)",
    )
    config.addinivalue_line(
        "markers",
        "mesh(shape, names=None): the test body runs on the ranks of a mesh, which the fixture mesh gives it: "
        'mesh((2, 2), names=("dp", "tp")) (localtensor)',
    )
    config.stash[rank_marks.SETTINGS] = _settings(config)


def _ini_name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _settings(config: pytest.Config) -> rank_marks.SessionSettings:
    settings: dict[str, Any] = {}
    typed = set()
    for name, (option, _, check, _) in _OPTIONS.items():
        value, source = config.getoption(f"localtensor_{name}"), option
        if value is None:
            value, source = config.getini(_ini_name(option)) or None, _ini_name(option)
        else:
            typed.add(name)
        if value is not None:
            settings[name] = check("pytest", source, value)
    if "trace" in settings and settings.get("on", "threads") != "threads":
        problem, remedy = "it is for rank threads, and these are real processes", "Leave one of the options out."
        raise rank_marks.usage_error("pytest", "--rank-trace", str(settings["trace"]), problem, remedy)
    return rank_marks.SessionSettings(typed=frozenset(typed), **settings)


def pytest_report_header(config: pytest.Config) -> list[str]:
    settings = config.stash[rank_marks.SETTINGS]
    named = [(option.removeprefix("--"), name) for name, (option, *_) in _OPTIONS.items() if name in settings.typed]
    typed = [f"{option} {getattr(settings, name)}" for option, name in named]
    return [f"localtensor: {', '.join(typed)}"] if typed else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    numbers = rank_marks.collect_marks(_marks_with_nodes(metafunc.definition)).numbers
    if len(numbers) > 1 and len({*map(repr, numbers)}) == len(numbers):  # else it is refused, once
        metafunc.fixturenames.append(_RANKS_PARAMETER)
        metafunc.parametrize(_RANKS_PARAMETER, numbers, indirect=True, ids=[f"ranks={number}" for number in numbers])


def _marks_with_nodes(node: pytest.Item) -> list[tuple[Any, pytest.Mark]]:
    return [(where, mark) for where, mark in node.iter_markers_with_node() if mark.name in ("ranks", "mesh")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each rank test its plan.  A test that cannot run, as for a bad mark, is an error by itself."""
    settings = config.stash[rank_marks.SETTINGS]
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        marks = rank_marks.collect_marks(_marks_with_nodes(item))
        if marks.there or not _OURS.isdisjoint(item.fixturenames):
            try:
                _plan_item(item, marks, settings)
            except pytest.UsageError as refusal:
                item.stash[_REFUSED] = str(refusal)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imports torch and what runs ranks where there are rank tests: else their seconds would be those of the first test."""
    tests = session.items if not session.config.option.collectonly else []
    if any(rank_marks.PLAN in item.stash or "world" in getattr(item, "fixturenames", ()) for item in tests):
        with contextlib.suppress(ImportError):  # the first rank test says what is missing
            importlib.import_module("localtensor.pytest_plugin.item")


def _plan_item(item: pytest.Function, marks: rank_marks.Marks, settings: rank_marks.SessionSettings) -> None:
    requested = fixtures.requested_fixtures(item)
    per_rank = sorted(requested.ours & fixtures.PER_RANK)
    if requested.wide is not None:
        fixture, scope, needs = requested.wide
        problem, remedy = (
            f"it has {scope} scope, and {needs} has a value in each rank of one test",
            "Give it function scope.",
        )
        raise rank_marks.usage_error(item.nodeid, f"fixture {fixture}", f"asks for {needs}", problem, remedy)
    beside = "world" in requested.ours
    if marks.there or (settings.ranks is not None and per_rank and not beside):
        if beside:
            value, problem = "asked for in a rank test", "the ranks of a test cannot start another run"
            remedy = "Leave out the mark or the fixture."
            raise rank_marks.usage_error(item.nodeid, "fixture world", value, problem, remedy)
        callspec = getattr(item, "callspec", None)
        chosen = callspec.params.get(_RANKS_PARAMETER) if callspec is not None else None
        item.stash[rank_marks.PLAN] = rank_marks.plan_test(item.nodeid, marks, settings, chosen)
        return
    outside = [name for name in per_rank if not (beside and name == "comms")]
    if outside:
        problem = "it has a value in each rank, and this test does not run on ranks"
        value, remedy = "asked for outside a rank test", "Mark the test with @pytest.mark.ranks(4), or give --ranks 4."
        raise rank_marks.usage_error(item.nodeid, f"fixture {outside[0]}", value, problem, remedy)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _REFUSED in item.stash:
        pytest.fail(item.stash[_REFUSED], pytrace=False)
    plan = item.stash.get(rank_marks.PLAN, None)
    if plan is not None:
        from localtensor.pytest_plugin.item import RankTest

        item.stash[_TEST] = RankTest(item, plan)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> object:
    plan = request._pyfuncitem.stash.get(rank_marks.PLAN, None)  # private to pytest: see the list in `fixtures`
    if plan is None:
        return None
    return fixtures.defer_fixture(fixturedef, request, has_log=plan.on == "threads")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    test = item.stash.get(_TEST, None)
    if test is None:
        return (yield)
    with test.running_on_ranks():
        return (yield)


def pytest_assertion_pass(item: pytest.Item, lineno: int, expl: str) -> None:
    if rank_marks.PLAN in item.stash:
        from localtensor.pytest_plugin.assertions import record_passed

        record_passed(item.stash, lineno, expl)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        test = item.stash.get(_TEST, None)
        if test is not None:
            test.environment.restore()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    test = item.stash.get(_TEST, None)
    if test is not None and call.excinfo is not None:
        from localtensor.pytest_plugin.item import add_rank_section

        add_rank_section(report, call.excinfo.value, test)
    return report


@pytest.fixture
def _ranks(request: pytest.FixtureRequest) -> int:
    """The number of ranks of a test that is parametrized over several."""
    return int(request.param)


def _fail_outside(name: str) -> NoReturn:
    problem = "asked for outside a rank test"
    pytest.fail(f"fixture {name}: {problem}. Mark the test with @pytest.mark.ranks(4).", pytrace=False)


@pytest.fixture
def rank() -> int:
    """In a rank test: this rank, from 0 to world_size - 1."""
    return int(_fail_outside("rank"))


@pytest.fixture
def world_size() -> int:
    """In a rank test: the number of ranks."""
    return int(_fail_outside("world_size"))


@pytest.fixture
def mesh() -> Any:
    """In a rank test: the DeviceMesh of @pytest.mark.mesh, or a mesh of one dim of all ranks."""
    return _fail_outside("mesh")


@pytest.fixture
def world(pytestconfig: pytest.Config) -> fixtures.World:
    """In an ordinary test: `world.run(fn, *args, ranks=4)` runs fn on ranks, as localtensor.run does, with the
    session's options as defaults."""
    return fixtures.World(pytestconfig.stash[rank_marks.SETTINGS])


@pytest.fixture
def comms(request: pytest.FixtureRequest) -> comms_fixtures.Comms:
    """The event log.  In a rank test: the calls of this rank so far (`comms.of_all_ranks`: of all).  Beside `world`:
    the calls of the ranks of the last `world.run`."""
    if "world" not in request.fixturenames:
        _fail_outside("comms")
    ran: fixtures.World = request.getfixturevalue("world")
    return comms_fixtures.Comms(lambda: ran.calls, None)


@pytest.fixture
def comms_snapshot(request: pytest.FixtureRequest) -> comms_fixtures.CommsSnapshot:
    """`assert comms == comms_snapshot`: what the ranks call, with bytes and axes, is as `--rank-snapshots update` wrote it."""
    update = request.config.stash[rank_marks.SETTINGS].snapshots == comms_fixtures.UPDATE
    return comms_fixtures.CommsSnapshot(request.path, request.node.nodeid.partition("::")[2], update=update)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """The lines in which the communication differs from its snapshot."""
    for snapshot, ran in ((left, right), (right, left)) if op == "==" else ():
        if isinstance(snapshot, comms_fixtures.CommsSnapshot) and isinstance(ran, comms_fixtures.Comms):
            return ["the communication differs from its snapshot", *snapshot.differences]
    return None


@pytest.fixture
def compare(pytestconfig: pytest.Config) -> fixtures.Comparer:
    """In an ordinary test: `compare(build, parallelize, batch, mesh=...)` as localtensor.compare, on what --ranks-on says
    and from --rank-seed; `compare.functions(reference, parallel, inputs, mesh=...)` as localtensor.compare_functions."""
    return fixtures.Comparer(pytestconfig.stash[rank_marks.SETTINGS])
