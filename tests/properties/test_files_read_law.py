"""Every file that is read: any bytes, and any JSON in the place of an honest part, are refused in one sentence.

A reader may take what it is given (exit code 0, 1 or 3), or refuse it (2, and one line); it never raises anything else, and no
control character reaches the terminal. To refuse takes no time: a file that is small does not make the tool large.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import re
import zlib
from base64 import urlsafe_b64encode

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from localtensor.concurrency import bounded, schedule
from localtensor.errors import LocalTensorError
from localtensor.errors.runs import BadSchedule
from strategies.base.journal import FOREIGN_LINE_ERRORS, BadJournal, load_journal
from strategies.cli.commands import coverage, report
from strategies.cli.options import CoverageOptions, MergeOptions, ReportOptions
from strategies.gate import baseline, verdict_cache
from strategies.gate.baseline import BadBaseline
from strategies.gate.changes.project import _parsed
from strategies.gate.plan import run_of_lines
from strategies.gate.verdict_cache import VerdictCache
from strategies.inputs import gathering
from strategies.model.cause import CauseRecord, causes_line
from strategies.model.rule import Program
from strategies.model.settings import BadSetting, Settings
from strategies.planner.steps.topology import BadTopology, read_topology
from strategies.sweep import session
from strategies.sweep.causes.cause import attribution_tasks
from strategies.sweep.causes.records import kept
from strategies.torch_api.user_modules import RegisteredOverload
from strategies.validation.finding import Candidate, candidate_data, read_case
from tests.strategies import journals
from tests.strategies.cases import sample
from tests.strategies.validation.test_finding_candidate import ONE, X, instance

law = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
)
ODD_TEXTS = st.sampled_from(
    ["", "\x1b[31m", "\ud800", "cuda:7", "meta", "nowhere", "float9", "complex32", "../../x", "a\n::error::b", "-", "R",
     "S(-1)", "P(nothing)", "2,2", "9" * 400, "aten.add.Tensor", "aten.add.Tensor alone real 99999999999999999999"]
)  # fmt: skip
DEEP = json.loads("[" * 150 + "]" * 150)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([-1, 0, 1 << 40, 1 << 70, 10**400]) | st.text() | ODD_TEXTS
    | st.floats(allow_nan=False, allow_infinity=False) | st.just(DEEP)
)  # fmt: skip
NAMES = st.sampled_from(["tensor", "device", "dtype", "leaf", "float", "complex", "tuple", "layout", "op", "kind"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BYTES = st.binary(max_size=300) | st.text(st.characters(), max_size=99).map(lambda t: t.encode(errors="surrogatepass"))


def places(value, path=()):
    """The path of every part of a JSON value."""
    yield path
    if isinstance(value, (list, dict)):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*path, name))


@st.composite
def changed(draw, honest):
    """The honest value with one part, or two, replaced, left out or doubled."""
    value = copy.deepcopy(honest)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(value))))
        if not path:
            return copy.deepcopy(draw(VALUES))  # which the next change may change
        at = value
        for name in path[:-1]:
            at = at[name]
        how = draw(st.sampled_from(["replaced", "replaced", "replaced", "left out", "doubled"]))
        if how == "left out":
            del at[path[-1]]
        elif how == "doubled" and isinstance(at, list):
            at.append(copy.deepcopy(at[path[-1]]))
        else:
            at[path[-1]] = copy.deepcopy(draw(VALUES))
    return value


PROGRAM = Candidate(
    instance(ranks=4),
    Program(ONE, (2, 2), ((instance().rule.inputs[0], instance().rule.inputs[0]),), "sum", 5, 2, True),
)
STRIDED = Candidate(instance(sample("cumprod.default", X.t(), -1), variant="specials", draw=3))
UNIT = journals.validated(
    "aten.cumprod.default", trial="meshes", mesh=(2, 2), samples=1, tried=2, whole={PROGRAM.name: [PROGRAM]},
    suspects={STRIDED.name: [STRIDED]}, missing=[STRIDED.instance], left_out={"forms": ["a", "b"]},
)  # fmt: skip
CAUSE = CauseRecord("cumprod-1", ("a", "b"), "a function", "wrong", "2.13.0", (journals.SILENT.name,), ("aten.cumprod.default",),
                    rank=(0, 1), tried=(("a part", 1),), versions=(("2.12.0", "present"),), script="print(1)\n")  # fmt: skip
JOURNAL = json.loads(json.dumps([journals.begin(), *journals.lines(), UNIT, causes_line([CAUSE], "2.13.0", None)]))
BASELINE = {"format": 1, "torch": "2.13.0", "entries": [
    {"op": "a.b.default", "rule": "R -> R", "dtypes": "real", "mesh": "1 axis", "reason": "why", "expires": "2027-01-31"},
    {"op": "a.c.default", "rule": "R -> R", "dtypes": "any", "mesh": "any", "reason": "why"},
]}  # fmt: skip
LINK = {"latency_us": 5, "gigabytes_per_second": 25}
TOPOLOGY = {"ranks_per_node": 8, "inner": LINK, "outer": LINK, "axes": {"dp": LINK}, "memory": LINK}


@pytest.fixture(autouse=True)
def few_members(monkeypatch):
    """Of the overloads that DTensor registers three: they are in no file, and to list them all takes a while."""
    found = [RegisteredOverload(op, "table") for op in journals.OPS[:3]]
    monkeypatch.setattr(coverage.user_modules, "all_registered_overloads", lambda device: found)


def as_lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def ran(command, options):
    """The exit code; what was printed has no control character, and a refusal is one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(options)
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]|^::", out.getvalue() + err.getvalue(), re.MULTILINE)
    assert code in (0, 1, 2, 3)
    if code == 2:
        assert err.getvalue().count("\n") == 1 and err.getvalue().startswith("localtensor ") and not out.getvalue()
    return code


def resumed(path):
    """The exit code of `localtensor validate --resume`, up to its first step of work."""
    try:
        with session.open_journal(path, resume=True) as journal:
            session._Validation(Settings(("add",)), journal, session.Progress())
    except BadJournal:
        return 2
    return 0


def attributed(path):
    """As `localtensor causes JOURNAL`, without its work."""
    try:
        read = load_journal(path)
        kept(read)
        attribution_tasks(read.begin, read.lines)
    except (BadJournal, *FOREIGN_LINE_ERRORS):
        return 2
    return 0


READERS = {
    "report": lambda path: ran(report.run, ReportOptions(path, path.with_suffix(".html"))),
    "merge": lambda path: ran(
        report.merge_journals,
        MergeOptions(
            (path,), json=path.with_suffix(".json"), repro=path.parent / "scripts", out=path.with_suffix(".out")
        ),
    ),
    "coverage": lambda path: ran(coverage.run, CoverageOptions(path)),
    "resume": resumed,
    "causes": attributed,
}


@pytest.mark.parametrize("reader", READERS)
def test_the_honest_journal_is_read(reader, tmp_path):
    (tmp_path / "j").write_bytes(as_lines(JOURNAL))
    assert READERS[reader](tmp_path / "j") == {"merge": 3, "resume": 0}.get(reader, 0)


@pytest.mark.parametrize("reader", READERS)
@law
@given(data=BYTES, after=st.booleans())
@example(data=b"[" * 200_000, after=False)
@example(data=b'{"kind":"unit","unit":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n{}", after=True)
def test_any_bytes_are_no_journal(reader, tmp_path, data, after):
    assume(b"\n" in data or not after)  # else it is a last line that was cut
    (tmp_path / "j").write_bytes((as_lines(JOURNAL[:3]) if after else b"") + data + b"\n\n")
    assert READERS[reader](tmp_path / "j") == (0 if reader == "resume" and not (tmp_path / "j").stat().st_size else 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("reader", READERS)
@law
@given(rows=changed(JOURNAL))
def test_a_journal_with_other_parts_is_read_or_refused(reader, tmp_path, rows):
    (tmp_path / "j").write_bytes(as_lines(rows if isinstance(rows, list) else [rows]))
    READERS[reader](tmp_path / "j")
    assert {one.name for one in tmp_path.iterdir()} <= {"j", "j.html", "j.json", "j.out", "scripts"}


@pytest.mark.parametrize("reader", READERS)
@law
@given(line=changed(UNIT) | changed(journals.settled(journals.SILENT)) | changed(JOURNAL[0]) | changed(JOURNAL[-1]))
def test_one_line_with_other_parts_is_read_or_refused(reader, tmp_path, line):
    first = line if isinstance(line, dict) and line.get("kind") == "begin" else JOURNAL[0]
    (tmp_path / "j").write_bytes(as_lines([first, *JOURNAL[1:6], line]))
    assert READERS[reader](tmp_path / "j") in range(4)  # a code of the tool, and no exception


@law
@given(data=changed([0, candidate_data(PROGRAM)]) | changed([0, candidate_data(STRIDED)]))
@example(data=[0, {**candidate_data(PROGRAM), "ranks": 1 << 40}])
def test_a_case_is_read_or_refused(data):
    with contextlib.suppress(BadSetting):
        _, candidate = read_case(urlsafe_b64encode(zlib.compress(json.dumps(data).encode())).decode())
        assert isinstance(candidate.name, str) and candidate.instance.ranks <= 64


@law
@given(text=st.text(max_size=99) | BYTES.map(lambda data: urlsafe_b64encode(zlib.compress(data)).decode()))
def test_any_text_is_no_case(text):
    with pytest.raises(BadSetting, match="this is no case of a finding"):
        read_case(text)


@law
@given(data=BYTES | changed(BASELINE).map(lambda value: json.dumps(value).encode()))
@example(data=b"[" * 200_000)
@example(data=b'{"format": 1, "torch": "\\ud800", "entries": []}')
def test_a_baseline_is_read_or_refused(tmp_path, data):
    (tmp_path / "b.json").write_bytes(data)
    try:
        read = baseline.read(tmp_path / "b.json")
    except BadBaseline:
        return
    assert baseline.read(baseline.write(read, read.torch).path).entries == read.entries


@law
@given(data=BYTES | changed(TOPOLOGY).map(lambda value: json.dumps(value).encode()))
@example(data=b"[" * 200_000)
def test_a_topology_is_read_or_refused(tmp_path, data):
    (tmp_path / "t.json").write_bytes(data)
    with contextlib.suppress(BadTopology):
        assert read_topology(tmp_path / "t.json") == read_topology(tmp_path / "t.json")


@law
@given(said=changed(JOURNAL[1:]), form=st.sampled_from([1, 1, 2, "1", None]))
def test_a_cached_verdict_is_read_or_as_if_absent(tmp_path, said, form):
    cache = VerdictCache(tmp_path, Settings(("add",)), lambda op: "content", "tool")
    name = cache._name("aten.cumprod.default")
    body = {"format": form, "name": name, "sum": verdict_cache._hex(said), "said": said}
    (tmp_path / f"{name}.json").write_text(json.dumps(body))
    lines = cache.lines("aten.cumprod.default")
    if lines is not None:
        rows = [line for line in lines if line["kind"] in ("unit", "settled")]
        assert run_of_lines(JOURNAL[0], rows) is not None


@law
@given(data=BYTES)
def test_any_bytes_are_no_cached_verdict(tmp_path, data):
    cache = VerdictCache(tmp_path, Settings(("add",)), lambda op: "content", "tool")
    for op in ("aten.cumprod.default", ""):
        (tmp_path / f"{cache._name(op)}.json").write_bytes(data)
    assert cache.lines("aten.cumprod.default") is cache.ops() is None


@law
@given(rows=changed([json.loads(row) for row in gathering.samples_lines("run", {ONE.op: ([ONE], "")})]), data=BYTES)
def test_samples_are_read_or_captured_anew(tmp_path, rows, data):
    (tmp_path / "s").write_bytes(as_lines(rows if isinstance(rows, list) else [rows]))
    gathering.read_samples(tmp_path / "s", "run", {ONE.op})
    (tmp_path / "s").write_bytes(data)
    assert gathering.read_samples(tmp_path / "s", "run", {ONE.op}) is None


@law
@given(
    text=st.text(max_size=200)
    | st.from_regex(r"(pct|shuffled|bounded|round_robin)(:[0-9]{1,99}){0,3}(=[0-9]+:n?[0-9x,]+)?")
)
def test_a_schedule_is_read_or_refused(text):
    for read in (schedule.replay, bounded.read_bounded):
        with contextlib.suppress(BadSchedule):
            again = read(text)
            with contextlib.suppress(LocalTensorError):
                again.begin(2)
                assert again.next([0, 1], None) in (0, 1)


@law
@given(text=BYTES, stub=BYTES)
@example(text=b"(" * 100_000, stub=b"")
@example(text=b"x = " + b"1+" * 50_000 + b"1", stub=b"\0")
def test_a_module_of_a_revision_is_parsed_or_not(text, stub):
    assert isinstance(_parsed(text, stub), ast.Module | None)
