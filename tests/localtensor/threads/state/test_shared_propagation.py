"""Ranks share what DTensor propagates, and only what does not depend on the rank."""

import contextlib
import dataclasses
import functools
import gc
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import localtensor as lt
from localtensor.concurrency.single_flight import IdentityKey
from localtensor.threads.state import shared_propagation


def propagator():
    return DTensor._op_dispatcher.sharding_propagator


def asked_of_torch(program, ranks, **options):
    """What the ranks return, and the ops that torch itself was asked about, one for each time."""
    asked = []
    kind = type(propagator())
    original = kind.propagate_op_sharding_non_cached

    def counting(self, schema):
        asked.append(str(schema.op))
        return original(self, schema)

    kind.propagate_op_sharding_non_cached = counting
    try:
        return lt.run(program, ranks=ranks, **options).values, asked
    finally:
        kind.propagate_op_sharding_non_cached = original


def even_product():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    y = x @ w
    return y.placements, y.device_mesh is mesh, y.to_local().sum().item(), y.full_tensor().sum().item()


def uneven_product():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = distribute_tensor(torch.arange(28.0).reshape(7, 4), mesh, [Shard(0)])
    y = x.reshape(7, 2, 2)
    return tuple(y.to_local().shape), y.full_tensor().shape, torch.equal(y.full_tensor().flatten(), torch.arange(28.0))


def even_view():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    y = x.view(8, 2, 2)
    return tuple(y.to_local().shape), y.device_mesh is mesh


def embedding():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weight = distribute_tensor(torch.arange(16.0).reshape(8, 2), mesh, [Shard(0)])
    which = distribute_tensor(torch.tensor([0, 7, 3, 4]), mesh, [Replicate()])
    return torch.nn.functional.embedding(which, weight).full_tensor().tolist()


def test_one_rank_computes_and_the_others_get_the_same_on_their_own_mesh():
    values, asked = asked_of_torch(even_product, 4)
    assert asked.count("aten.mm.default") == 1
    whole = torch.arange(32.0).reshape(4, 8).sum(1) * 4
    assert [value[2] for value in values] == whole.tolist()
    assert all(value[:2] == ((Shard(0),), True) for value in values)
    assert all(value[3] == 4 * sum(range(32)) for value in values)


def two_permutations():
    """A decomposed op with one list of dims, then another: an entry for the first must not serve the second."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    d = distribute_tensor(x, mesh, [Shard(1)])
    found = [torch.permute_copy(d, dims) for dims in ((1, 2, 3, 0), (2, 1, 3, 0))]
    return [(y.placements, tuple(y.shape)) for y in found], torch.equal(found[1].full_tensor(), x.permute(2, 1, 3, 0))


def test_a_rank_that_did_not_compute_knows_which_arguments_belong_to_the_key():
    values, asked = asked_of_torch(two_permutations, 2)
    assert list(values) == [([((Shard(0),), (2, 3, 4, 1)), ((Shard(1),), (3, 2, 4, 1))], True)] * 2
    assert asked.count("aten.permute_copy.default") == 2  # once for each list, for both ranks


def met_first_on_uneven_shards():
    """Rank 0 meets the op on uneven shards, which each rank computes for itself; rank 1 only gets what rank 0 has computed."""
    mesh = init_device_mesh("cpu", (2,))

    def permuted(sizes, dims):
        y = torch.permute_copy(distribute_tensor(torch.ones(sizes), mesh, [Shard(1)], src_data_rank=None), dims)
        return y.placements, tuple(y.shape)

    if torch.distributed.get_rank() == 0:
        permuted((1, 3, 3, 4), (0, 1, 2, 3))
        permuted((1, 2, 3, 4), (1, 2, 3, 0))
    torch.distributed.barrier()
    return [permuted((1, 2, 3, 4), dims) for dims in ((1, 2, 3, 0), (2, 1, 3, 0))]


def test_what_a_rank_notes_while_it_computes_for_itself_is_for_the_others_too():
    right = [((Shard(0),), (2, 3, 4, 1)), ((Shard(1),), (3, 2, 4, 1))]
    assert list(lt.run(met_first_on_uneven_shards, ranks=2).values) == [right, right]


@pytest.mark.parametrize(("said", "share"), [("1", False), ("0", None)])
def test_without_sharing_each_rank_computes_for_itself_and_gets_the_same(monkeypatch, said, share):
    monkeypatch.setenv("LOCALTENSOR_SHARE", said)
    alone, asked = asked_of_torch(even_product, 4, share=share)
    assert asked.count("aten.mm.default") == 4
    assert alone == asked_of_torch(even_product, 4, share=True)[0]


def test_a_choice_that_there_is_not_is_refused():
    with pytest.raises(lt.errors.LocalTensorError, match="Write True, False, None"):
        lt.run(even_product, ranks=2, share="yes")


def test_a_rank_that_comes_while_another_computes_does_not_wait_and_gets_its_own(monkeypatch):
    """A rule may do anything, even meet the other ranks: who waited for its answer then would wait for ever."""

    def meets(op, args, kwargs):
        torch.distributed.barrier()
        return [[Shard(0), Shard(0), Replicate()]]

    rule = dataclasses.replace(propagator().op_single_dim_strategy_funcs[torch.ops.aten.mm.default], func=meets)

    def program():
        propagator().op_single_dim_strategy_funcs[torch.ops.aten.mm.default] = rule
        return even_product()

    values, asked = asked_of_torch(program, 2, timeout=20)
    assert asked.count("aten.mm.default") == 2
    assert [value[2] for value in values] == (torch.arange(32.0).reshape(2, 16).sum(1) * 4).tolist()


def test_a_refusal_is_every_ranks_and_is_not_kept():
    def program():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        told = []
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                torch.ops.aten.masked_select(x, x > 0)
            told.append(str(caught.value))
        return told

    values, asked = asked_of_torch(program, 2)
    assert len({line for told in values for line in told}) == 1
    assert asked.count("aten.masked_select.default") == 4


def test_arguments_that_torch_rewrites_for_even_pieces_are_shared_too():
    values, asked = asked_of_torch(even_view, 4)
    assert values == (((2, 2, 2), True),) * 4
    assert asked.count("aten.view.default") == 1


def test_uneven_pieces_are_each_ranks_own_matter():
    values, asked = asked_of_torch(uneven_product, 4)
    assert [value[0] for value in values] == [(2, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2)]
    assert all(value[1:] == (torch.Size([7, 2, 2]), True) for value in values)
    assert asked.count("aten.view.default") == 4


def test_placements_that_carry_state_are_each_ranks_own():
    values, asked = asked_of_torch(embedding, 4)
    assert values == ([[0, 1], [14, 15], [6, 7], [8, 9]],) * 4
    assert asked.count("aten.embedding.default") == 4


def test_equal_arguments_of_another_type_are_another_question():
    meshes = []
    keys = {shared_propagation._key(value, meshes) for value in (1, 1.0, True)}
    assert len(keys) == 3
    assert meshes == []


def filled(values):
    """Each rank fills in its own value."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    return x.new_full((4, 2), values[torch.distributed.get_rank()]).to_local()


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (float("nan"), 0.0)], ids=str)
def test_a_number_is_filled_in_with_the_sign_that_its_rank_gave(values):
    got = lt.run(filled, values, ranks=2).values
    assert [str(piece.flatten()[0]) for piece in got] == [str(torch.full((), value)) for value in values]


@pytest.mark.parametrize("zero", [0.0, 0j], ids=str)
def test_a_zero_and_its_negative_are_two_questions_and_nan_is_one(zero):
    assert shared_propagation._key(zero, []) != shared_propagation._key(-zero, [])
    assert shared_propagation._key(float("nan"), []) == shared_propagation._key(float("nan"), [])


def test_a_rule_that_is_not_torchs_may_ask_for_the_rank_so_each_rank_asks_it():
    """Ranks that disagree wait for each other on real processes: whoever shared an answer would hide it."""
    op, asked = torch.ops.aten.neg.default, []
    torchs = propagator().op_single_dim_strategy_funcs.get(op)
    if torchs is None:
        pytest.skip(f"torch {torch.__version__} has no single-dim strategy for {op}")

    @functools.wraps(torchs.func)  # which takes its `__module__`, too
    def asks(op, args, kwargs):
        asked.append(torch.distributed.get_rank())
        return [[Shard(0), Shard(0)]] if asked[-1] else [[Replicate(), Replicate()]]

    rule = dataclasses.replace(torchs, func=asks)

    def program():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        propagator().op_single_dim_strategy_funcs[op] = rule
        return DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]).neg()._spec.placements

    ended = {}
    for share in (True, False):
        asked.clear()
        with pytest.raises(lt.errors.LocalTensorError) as ending:
            lt.run(program, ranks=2, share=share)
        ended[share] = type(ending.value), sorted(set(asked))
    assert ended[True] == ended[False] and ended[True][1] == [0, 1]


def test_an_op_that_goes_by_the_rules_of_its_parts_is_not_shared_where_one_rule_is_not_torchs():
    schema = type("Schema", (), {"op": torch.ops.aten.nonzero.default})()  # any that no table has
    table, op = propagator().op_single_dim_strategy_funcs, torch.ops.aten.mm.default
    assert shared_propagation._rules_and_settings(propagator(), schema)
    torchs = table[op]
    table[op] = dataclasses.replace(torchs, func=lambda op, args, kwargs: [])
    try:
        with pytest.raises(shared_propagation.NotShareable):
            shared_propagation._rules_and_settings(propagator(), schema)
    finally:
        table[op] = torchs


def test_every_rule_that_torch_brings_is_known_for_torchs():
    tables = propagator().op_single_dim_strategy_funcs, propagator().op_strategy_funcs, propagator().op_to_rules
    rules = {
        op: rule
        for table in tables
        for op, rule in table.items()
        if op.namespace in shared_propagation._TORCH_NAMESPACES
    }
    assert len(rules) > 500
    others = [str(op) for op, rule in rules.items() if not shared_propagation._is_torchs(rule)]
    assert others == [], "they are shared no longer: look at propagation._RULES"


def test_a_rule_for_an_op_of_somebody_elses_keeps_no_one_from_sharing():
    schema = type("Schema", (), {"op": torch.ops.aten.nonzero.default})()
    table, op = propagator().op_strategy_funcs, torch.ops._c10d_functional.wait_tensor.default
    before = shared_propagation._rules_and_settings(propagator(), schema)
    table[op] = lambda schema: None
    try:
        assert shared_propagation._rules_and_settings(propagator(), schema) == before
    finally:
        del table[op]


@contextlib.contextmanager
def cuda_autocast():
    """Also where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_what_a_rank_has_set_is_part_of_the_question():
    schema = type("Schema", (), {"op": torch.ops.aten.mm.default})()
    asked = [shared_propagation._rules_and_settings(propagator(), schema)]
    cpu = functools.partial(torch.autocast, "cpu", cache_enabled=False)
    settings = (
        torch.no_grad, torch.inference_mode, functools.partial(cpu, torch.bfloat16), functools.partial(cpu, torch.float16),
        cuda_autocast,
    )  # fmt: skip
    for setting in settings:
        with setting():
            asked.append(shared_propagation._rules_and_settings(propagator(), schema))
    assert len(set(asked)) == 6
    assert shared_propagation._rules_and_settings(propagator(), schema) == asked[0]


def test_a_rule_that_changes_during_the_run_is_asked_again():
    schema = type("Schema", (), {"op": torch.ops.aten.mm.default})()
    table = propagator().op_single_dim_strategy_funcs
    before = shared_propagation._rules_and_settings(propagator(), schema)
    rule = table.pop(schema.op)
    try:
        assert shared_propagation._rules_and_settings(propagator(), schema) != before
    finally:
        table[schema.op] = rule


def test_two_rules_are_one_only_if_they_are_the_same_object_which_lives_as_long_as_its_name():
    class Rule:
        def __eq__(self, other):
            return True

        __hash__ = None

    first = Rule()
    name, kept = IdentityKey(first), weakref.ref(first)
    assert name == IdentityKey(first) and name != IdentityKey(Rule()) and name != first
    del first
    gc.collect()
    assert kept() is not None


def test_torchs_propagator_is_as_before_after_a_run():
    before = propagator().propagate_op_sharding
    lt.run(even_product, ranks=2)
    assert propagator().propagate_op_sharding is before
    assert "propagate_op_sharding_non_cached" not in vars(propagator())


def test_torch_still_has_the_private_parts_that_are_touched():
    import importlib

    missing = []
    for name in shared_propagation.PRIVATE:
        module, _, part = name.rpartition(".")
        if module.endswith(".DTensor"):
            found = hasattr(DTensor, part)
        else:
            found = hasattr(importlib.import_module(module), part)
        missing += [] if found else [name]
    assert missing == [], f"torch {torch.__version__} no longer has these: propagation.py must be looked at"
