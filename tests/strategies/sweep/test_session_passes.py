"""What must not end in exit code 0: each op of the module is one way to pass without a test, or to be accused wrongly."""

import pytest

from strategies.model.settings import Settings
from strategies.model.verdict import Verdict
from strategies.sweep.session import validate
from strategies.validation.finding import read_case
from tests.strategies import users

MODULE = """
from torch.distributed.tensor import Partial

LIB.define("center_(Tensor(a!) x) -> ()")
LIB.impl("center_", lambda x: (x.sub_(x.mean(0, keepdim=True)), None)[1], "CPU")
LIB.impl("center_", lambda x: None, "Meta")
register_sharding(torch.ops.passes.center_.default)(lambda x: [([], R), ([], S0)])

LIB.define("halve_(Tensor(a!) x) -> ()")
LIB.impl("halve_", lambda x: (x.mul_(0.5), None)[1], "CPU")
LIB.impl("halve_", lambda x: None, "Meta")
register_sharding(torch.ops.passes.halve_.default)(lambda x: [([], R), ([], S0)])


def picky(x):
    raise ValueError("never")


op("picky", picky, (R, R))

LIB.define("taken_apart(Tensor x) -> Tensor")
LIB.impl("taken_apart", lambda x: x.exp().log(), "CompositeImplicitAutograd")
register_sharding(torch.ops.passes.taken_apart.default)(lambda x: [(R, R), (R, S0)])

op("trips", lambda x: x * 2)


@register_sharding(torch.ops.passes.trips.default)
def lines(x):
    return [(R, R), (S0, [Shard(x.no_such_thing)])]


LIB.define("gated(Tensor x, Tensor gate) -> Tensor")
LIB.impl("gated", lambda x, gate: x * gate, "CPU")
LIB.impl("gated", lambda x, gate: x * gate, "Meta")
register_sharding(torch.ops.passes.gated.default)(lambda x, gate: [(R, R + R), ([Partial()], [Partial()] + R)])


def samples(op):
    x = torch.arange(12.0).reshape(4, 3)
    if op is torch.ops.passes.gated.default:
        yield (torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, 3.0])), {}
    yield (x,) * len(op._schema.arguments), {}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passes")
    with users.undone():
        name = users.write(folder, "passes", MODULE)
        yield validate(Settings(rules=name, folder=str(folder), workers=1, ranks=(2, 3)))


def test_a_rule_for_an_op_without_outputs_is_judged_by_what_the_op_writes(report):
    unsound = [f for f in report.findings if f.verdict is Verdict.UNSOUND]
    assert [(f.name, f.confirmed_on) for f in unsound] == [("passes.center_.default: S(0) -> ", "gloo")]


def test_an_op_that_refuses_all_its_calls_is_listed_as_not_tested(report):
    assert dict(report.untested) == {"passes.picky.default": "the op refuses this sample: ValueError"}


def test_a_rule_for_an_op_that_torch_takes_apart_is_listed_as_ignored(report):
    ((op, why),) = report.ignored
    assert op == "passes.taken_apart.default" and why.startswith("torch runs this op as the ops that it is made of")


def test_a_rule_function_that_raises_is_a_finding_with_its_error(report):
    (only,) = (f for f in report.findings if f.verdict is Verdict.REFUSED)
    assert only.name == "passes.trips.default on (2,): R" and only.confirmed_on == "gloo"
    assert only.reason.startswith("every rank raises RuntimeError:") and "no_such_thing" in only.reason


def test_a_sum_of_booleans_accuses_no_linear_rule(report):
    assert dict(report.untestable) == {}
    assert not any("gated" in f.name for f in report.findings) and report.exit_code == 1


def test_the_command_beside_a_finding_shows_that_finding(report):
    for found in report.findings:
        text = found.command.split(" --case ")[1]
        assert found.command.startswith("localtensor validate --rules passes --case ")
        seed, candidate = read_case(text)
        assert seed == 0 and tuple(candidate.instance.sample.arguments()) == found.sample
