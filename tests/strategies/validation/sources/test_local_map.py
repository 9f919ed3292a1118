import functools
import types

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from strategies.model.oracle import run_oracle
from strategies.model.settings import BadRules
from strategies.model.verdict import Verdict
from strategies.torch_api.specs import local_map_declaration
from strategies.validation.probe import check_claims
from strategies.validation.sources.registry import source_named

X, W = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)


def declared(outputs, inputs, gradients=None):
    return functools.partial(local_map, out_placements=outputs, in_placements=inputs, in_grad_placements=gradients)


def module(**functions):
    made = types.ModuleType("placed_functions")
    for name, function in functions.items():
        setattr(made, name, function)
    return made


def verdicts(made, ranks=2):
    source = source_named("local_map").of_module(made)
    found = {}
    for sample in source.samples((), 0):
        oracle = run_oracle(sample)
        for instance in check_claims(sample, oracle, ranks, source.about(sample, oracle, 0).claims(ranks), seed=0):
            found.setdefault(sample.op.partition(".")[2], set()).add(instance.verdict.value)
    return found


def scale(x, w):
    return x * w


SCALED = [Shard(0)], ([Shard(0)], [Replicate()])


def test_a_right_declaration_is_sound_and_a_gradient_of_a_replicated_weight_must_be_declared():
    bare = module(f=declared(*SCALED)(scale), samples=lambda: [(bare.f, (X, W))])
    assert verdicts(bare) == {"f.default": {"sound"}, "f.gradient": {"unsound", "sound"}}  # w alone, and both
    full = module(f=declared(*SCALED, ([Shard(0)], [Partial()]))(scale), samples=lambda: [(full.f, (X, W))])
    assert verdicts(full) == {"f.default": {"sound"}, "f.gradient": {"sound"}}


def test_a_declared_output_that_the_function_does_not_make_is_found():
    made = module(f=declared([Replicate()], ([Shard(1)], [Shard(0)]))(torch.matmul), samples=lambda: [(made.f, (X, W))])
    assert verdicts(made)["f.default"] == {Verdict.UNSOUND.value}


def test_arguments_are_drawn_where_there_are_no_samples():
    made = module(f=declared([Shard(0)], ([Shard(0)], [Replicate()]))(torch.matmul))
    assert verdicts(made)["f.default"] == {"sound"}


def test_two_axes_are_no_claim_on_one():
    made = module(f=declared([Shard(0), Shard(1)], ([Shard(0), Shard(1)],))(torch.neg))
    assert verdicts(made) == {}


def test_a_module_without_declarations_is_one_sentence():
    with pytest.raises(BadRules, match="nothing in it is wrapped by local_map"):
        source_named("local_map").of_module(module(f=torch.neg))
    with pytest.raises(BadRules, match="speaks about a module of yours"):
        source_named("local_map").functions()


def test_samples_of_another_function_are_one_sentence():
    made = module(f=declared(*SCALED)(scale), samples=lambda: [(torch.neg, (X,))])
    with pytest.raises(BadRules, match="which is no pair of a function that local_map wraps and its arguments"):
        source_named("local_map").of_module(made)


def test_a_declaration_is_read_from_what_local_map_returns():
    found = local_map_declaration(declared(*SCALED)(scale))
    assert found.function is scale and found.axes == 1 and found.gradients is None
    assert found.inputs == (Shard(0), Replicate()) and found.outputs == (Shard(0),)
    assert local_map_declaration(scale) is None and local_map_declaration(functools.partial(scale, X)) is None
