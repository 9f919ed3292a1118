import re
import sys
from dataclasses import replace

import pytest
import torch

from strategies.inputs import gathering, opinfo_samples
from strategies.inputs.gathering import SampleSelection, chosen_samples, pick
from strategies.model.rule import Sample, call_of, overload
from strategies.model.settings import Settings, UnknownOp
from strategies.torch_api import dtensor, user_modules
from strategies.torch_api.user_modules import RegisteredRules
from tests.strategies import users
from tests.tools import warm


@pytest.fixture(autouse=True)
def restored():
    with users.undone():
        yield


def asked(*patterns, **given):
    return Settings(patterns, **given)


def picked(*patterns):
    return pick(asked(*patterns), None)


def names_of(picked):
    return sorted({opinfo_samples.database()[n].name for n in picked.infos})


def a_call(name="aten.add.Tensor", x=None, y=2, origin="test"):
    call, tensors = call_of(overload(name), (torch.arange(8.0) if x is None else x, y), {})
    return Sample(call, tuple(tensors), origin)


# Names.


def test_an_opinfo_name_is_all_of_that_opinfo():
    found = picked("cumprod")
    assert names_of(found) == ["cumprod"]
    assert (found.whole, found.overloads, found.everything) == (found.infos, frozenset(), False)


def test_a_glob_is_all_that_it_fits():
    found = picked("nn.functional.avg_pool?d")
    assert names_of(found) == [f"nn.functional.avg_pool{n}d" for n in (1, 2, 3)]


def test_an_overload_is_that_overload_and_looked_for_under_its_own_name():
    found = picked("aten.add.Tensor")
    assert found.overloads == {"aten.add.Tensor"}
    assert (names_of(found), found.whole) == (["add"], ())


@pytest.mark.parametrize("name", ["add.Tensor", "aten.add.Tensor"])
def test_an_overload_needs_no_namespace(name):
    assert picked(name) == picked("aten.add.Tensor")


@pytest.mark.parametrize("name", ["_log_softmax", "aten._log_softmax"])
def test_a_packet_is_every_overload_of_it_that_has_a_rule(name):
    known = {str(op) for op in dtensor.registered_overloads()}
    assert picked(name).overloads == {op for op in known if op.startswith("aten._log_softmax.")} != set()


def test_an_overload_that_no_opinfo_bears_is_looked_for_under_a_part_of_its_name():
    found = picked("aten.select_backward.default")
    assert "select" in names_of(found) and len(found.infos) < 9
    assert found.overloads == {"aten.select_backward.default"}


def test_an_overload_of_which_no_opinfo_bears_a_part_is_looked_for_in_all():
    found = picked("aten.__ixor__.Tensor")
    assert len(found.infos) == len(opinfo_samples.database())
    assert found.overloads == {"aten.__ixor__.Tensor"}


def test_names_add_up():
    found = picked("cumprod", "aten.add.Tensor")
    assert names_of(found) == ["add", "cumprod"]
    assert [opinfo_samples.database()[n].name for n in found.whole] == ["cumprod"]


def test_all_is_every_opinfo():
    assert pick(Settings(everything=True), None) == SampleSelection(
        tuple(range(len(opinfo_samples.database()))), everything=True
    )


@pytest.mark.parametrize("name", ["cumprodd", "aten.cumprod.defualt", "nn.functional.rellu", "*no_such*"])
def test_an_unknown_op_is_refused_with_what_comes_near(name):
    near = {
        "cumprodd": "cumprod",
        "aten.cumprod.defualt": "aten.cumprod.default",
        "nn.functional.rellu": "nn.functional.relu",
    }
    remedy = (
        rf"Did you mean {re.escape(near[name])}( or \S+)*\?"
        if name in near
        else "`localtensor validate --all` tries every op."
    )
    with pytest.raises(UnknownOp) as refused:
        picked("add", name)
    said = rf"localtensor validate: OP: '{re.escape(name)}': no op and no overload has this name\. "
    assert re.fullmatch(said + remedy, str(refused.value)), str(refused.value)


def test_rules_of_a_module_are_its_own_overloads_and_nothing_else():
    found = pick(Settings(rules="some"), RegisteredRules("some", ("aten.cumprod.default", "mine.x.default"), ()))
    assert (found.overloads, names_of(found), found.whole) == (
        {"aten.cumprod.default"},
        ["cumprod", "masked.cumprod"],
        (),
    )


def test_ops_of_a_users_own_need_no_opinfo(monkeypatch):
    monkeypatch.setattr(opinfo_samples, "database", lambda: pytest.fail("OpInfo was imported"))
    assert pick(Settings(rules="some"), RegisteredRules("some", ("mine.x.default",), ())) == SampleSelection(())


def test_what_is_wanted_of_the_calls_that_are_met():
    named = SampleSelection((3, 4), frozenset({"aten.mul.Tensor"}), whole=(3,))
    forward, backward = a_call(), a_call(origin="add #0 backward")
    assert named.wants(3, forward) and not named.wants(4, forward)
    assert not named.wants(3, backward)  # what autograd runs for another op is not what was named
    assert named.wants(4, a_call("aten.mul.Tensor"))
    assert SampleSelection((4,), everything=True).wants(4, backward)


# What is tried.


def test_overloads_are_tried_in_the_order_of_their_names():
    by_op = {name: [a_call(name)] for name in ("aten.sub.Tensor", "aten.add.Tensor", "aten.mul.Tensor")} | {
        "aten.div.Tensor": []
    }
    assert [op for op, _ in chosen_samples(by_op, SampleSelection(()), asked("x"))] == [
        "aten.add.Tensor",
        "aten.mul.Tensor",
        "aten.sub.Tensor",
    ]


def test_a_sweep_tries_fewer_samples_than_an_op_that_was_named():
    many = [a_call(y=n) for n in range(200)]
    assert count(many, SampleSelection((), everything=True)) == gathering.SAMPLES
    assert count(many, SampleSelection(())) == gathering.NAMED
    assert count(many, SampleSelection(()), search=True) == gathering.SEARCHED


def count(many, how, **given):
    ((_, found),) = chosen_samples({"aten.add.Tensor": many}, how, replace(asked("x"), **given))
    return len(found)


def test_an_overload_with_a_decomposition_only_is_found_by_its_full_name():
    assert gathering.pick(Settings(patterns=("aten.addmv.default",)), None).overloads == {"aten.addmv.default"}


def test_an_overload_that_is_not_there_is_unknown():
    with pytest.raises(UnknownOp, match="no op and no overload has this name"):
        gathering.pick(Settings(patterns=("aten.addmv.nothing",)), None)


def test_every_name_of_an_opinfo_is_quoted_in_its_sources():
    every = {name for info in opinfo_samples.database() for name in opinfo_samples.names(info)}
    assert len(every) > 500 and every <= opinfo_samples.quoted_names()


REFUSED = """
import sys
from strategies.inputs.gathering import pick
from strategies.model.settings import Settings, UnknownOp
try:
    pick(Settings(patterns=("cumprodd",)), None)
except UnknownOp as error:
    print("torch.testing._internal.common_methods_invocations" in sys.modules, error)
"""


def test_an_unknown_op_is_refused_before_opinfo_is_imported():
    done = warm.run([sys.executable, "-c", REFUSED], check=True)
    assert done.stdout.startswith("False ") and "Did you mean cumprod" in done.stdout.replace("'", ""), done.stdout


def test_what_a_gpu_alone_has_a_kernel_for_is_captured_there(monkeypatch):
    def missing(op, device="cpu"):
        return "no kernel" if device == "cpu" and "dot_product_flash_attention" in op else ""

    monkeypatch.setattr(user_modules, "missing_kernel_reason", missing)
    attention = next(n for n, info in enumerate(opinfo_samples.database()) if info.name == opinfo_samples.ATTENTION)
    every = SampleSelection((0, attention), everything=True)
    passes = gathering._passes_on("cuda", every, Settings(everything=True), {})
    assert {(one.info, one.device) for one in passes} == {(attention, "cuda")}
    assert {one.dtype for one in passes} == {"float64", "float32", "bfloat16"}
    met = {str(op): [None] for op in dtensor.registered_overloads()}
    assert gathering._passes_on("cuda", every, Settings(everything=True), met) == []
    assert gathering._passes_on("cpu", every, Settings(everything=True), {}) == []
