"""localtensor._util.opinfo: OpInfos and samples are torch's own, imported sooner, and nobody is looked for among the callers."""

import importlib
import inspect
import itertools
import json
import logging
import subprocess
import sys
import types
import unittest

import pytest
import torch

from localtensor._util import opinfo


@pytest.fixture(scope="module")
def infos():
    """By name.  Importing torch's database takes more than a second, in each worker if it is done while tests are collected."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {info.formatted_name: info for info in op_db}


def asks():
    return [getattr(importlib.import_module(home), opinfo.TEST_LOOKUP) for home in opinfo.LOOKUP_MODULES]


def told(samples, most=8):
    return [(one.input, one.args, one.kwargs) for one in itertools.islice(samples, most)]


def test_torch_still_has_the_parts_that_the_module_names(infos):
    """Red here: torch has moved what the module names; samples then cost milliseconds again, or are all seeded alike."""
    assert all(map(callable, asks())) and len(opinfo._original_lookups()) == len(opinfo.LOOKUP_MODULES)
    assert iter(infos["add"].sample_inputs("cpu", torch.float32)).set_seed is True


@pytest.mark.parametrize("name", ["add", "cumsum", "nn_functional_conv2d", "amax"])
def test_they_are_what_torch_draws_for_that_seed(infos, name):
    torch.manual_seed(7)
    theirs = iter(infos[name].sample_inputs("cpu", torch.float64, requires_grad=True))
    theirs.set_seed = False
    want = told(theirs)
    torch.manual_seed(7)
    with opinfo.drawn_samples(infos[name], "cpu", torch.float64, requires_grad=True) as samples:
        got = told(samples)
    torch.testing.assert_close([one[:2] for one in got], [one[:2] for one in want], rtol=0, atol=0, equal_nan=True)
    assert [one[2] for one in got] == [one[2] for one in want] and got[0][0].requires_grad
    torch.manual_seed(8)
    with opinfo.drawn_samples(infos[name], "cpu", torch.float64) as samples:
        assert not torch.equal(told(samples)[-1][0], want[-1][0])


def test_no_one_is_looked_for_while_they_are_drawn_and_torch_looks_again_afterwards(monkeypatch, infos):
    before, looked = asks(), []
    assert opinfo._no_test not in before
    stack = inspect.stack
    monkeypatch.setattr(inspect, "stack", lambda *given: looked.append(given) or stack(*given))
    with opinfo.drawn_samples(infos["sum"], "cpu", torch.float32) as samples:
        assert told(samples)
    assert looked == [] and asks() == before
    with pytest.raises(ZeroDivisionError), opinfo.drawn_samples(infos["sum"], "cpu", torch.float32):
        raise ZeroDivisionError
    assert asks() == before
    told(infos["sum"].sample_inputs("cpu", torch.float32))
    assert looked


def test_two_threads_inside_leave_torch_as_it_was(infos):
    before = asks()
    one, other = (opinfo.drawn_samples(infos["sum"], "cpu", torch.float32) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)  # not the one that came last, which is what only threads can do
    other.__exit__(None, None, None)
    assert asks() == before


def test_inside_of_a_test_case_they_are_the_same(infos):
    """torch seeds by the name of the test that it finds; what we draw is the same for a seed wherever it is drawn."""

    def once():
        torch.manual_seed(3)
        with opinfo.drawn_samples(infos["mul"], "cpu", torch.float32) as samples:
            return told(samples)

    class Case(unittest.TestCase):
        def test_it(self):
            torch.testing.assert_close(once(), want, rtol=0, atol=0)

    want = once()
    outcome = Case("test_it").run()
    assert outcome.testsRun == 1 and not outcome.errors and not outcome.failures


OPINFOS_IN_A_NEW_PROCESS = """
import json, sys
import torch
from localtensor._util import opinfo
if sys.argv[1] == "ours":
    infos = opinfo.opinfo_list()
    print("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules, file=sys.stderr)
else:
    from torch.testing._internal.common_methods_invocations import op_db as infos
said = [[info.formatted_name, repr(sorted(map(str, info.supported_dtypes("cpu")))), info.supports_autograd, info.aten_name,
         [alias.name for alias in info.aliases or ()], len(info.decorators), sorted(info._original_opinfo_args)]
        for info in infos]
import torch._inductor.utils
print(json.dumps([said, torch._inductor.utils.GPU_TYPES, callable(torch._dynamo.disable)]))
"""


def in_a_new_process(which):
    command = [sys.executable, "-c", OPINFOS_IN_A_NEW_PROCESS, which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout), done.stderr.split()


@pytest.mark.slow
def test_the_import_of_opinfo_needs_no_compiler():
    ours, seen = in_a_new_process("ours")
    assert len(ours[0]) > 500
    assert seen == ["False", "False"]


@pytest.mark.slow
def test_the_opinfos_are_torchs():
    (ours, _), (theirs, _) = map(in_a_new_process, ("ours", "torch"))
    assert ours == theirs


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 computes them: its source has no literal")
def test_the_gpu_types_are_those_of_torch():
    assert opinfo._gpu_types() == importlib.import_module("torch._inductor.utils").GPU_TYPES


@pytest.mark.parametrize(
    "text", ["GPU_TYPES = list(TYPES)\n", "nothing = 1\n", "GPU_TYPES = [\n", "GPU_TYPES = 'cuda'\n", None]
)
def test_a_torch_without_that_literal_imports_it(text, tmp_path, monkeypatch):
    (tmp_path / "_inductor").mkdir()
    if text is not None:
        (tmp_path / "_inductor/utils.py").write_text(text)
    monkeypatch.setattr(opinfo.torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    assert opinfo._gpu_types() is None
    with opinfo._gpu_types_alone():
        assert "torch._inductor" not in sys.modules


def test_opinfos_that_import_more_of_the_compiler_are_imported_as_torch_does_it(monkeypatch):
    called = []

    def never_at_first(name):
        called.append(name)
        if len(called) == 1:
            sys.modules["torch._inductor.half"] = types.ModuleType("half")  # what it has imported by then
            raise ImportError("cannot import name 'is_gpu' from 'torch._inductor.utils'")
        assert (
            "torch._inductor.half" not in sys.modules
        )  # the second import of its package would not have it as a member
        assert "torch._inductor.utils" not in sys.modules or hasattr(sys.modules["torch._inductor.utils"], "is_gpu")

    for name in opinfo.INDUCTOR:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(opinfo.importlib, "import_module", never_at_first)
    opinfo._import_opinfos()
    assert called == ["torch.testing._internal.opinfo.core", opinfo.OPINFOS]


def test_a_cuda_toolkit_without_a_gpu_is_no_warning(monkeypatch, caplog):
    builds = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(builds, "propagate", True)
    monkeypatch.setattr(builds, "level", logging.WARNING)

    def as_torch_does(name):
        builds.warning("No CUDA runtime is found, imported by %s", name)
        return types.ModuleType(name)

    monkeypatch.setattr(opinfo.importlib, "import_module", as_torch_does)
    opinfo._import_opinfos()
    assert caplog.messages == []
    builds.warning("afterwards")
    assert caplog.messages == ["afterwards"]
