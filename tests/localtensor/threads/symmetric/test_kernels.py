"""Each op by one-sided accesses against its meaning, and the decomposed pipelines of torch against both."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor.errors import NotServed, NotSymmetric, RankRaised, SymmetricRace, UnknownReduction
from localtensor.threads.symmetric.handle import SymmetricHandle
from localtensor.threads.symmetric.kernels import KERNELS, OF_HANDLES
from tests.localtensor import symmetric_meaning as meaning

OPS = torch.ops.symm_mem
RANKS = [1, 2, 3, 4]
SCHEDULES = ["round_robin", "shuffled:3", "pct:5"]


def world():
    return dist.group.WORLD.group_name


def share(x):
    """A symmetric copy of a tensor."""
    mine = symm_mem.empty(*x.shape, dtype=x.dtype, device="cpu").copy_(x)
    symm_mem.rendezvous(mine, world())
    return mine


def inputs(ranks, shape=(12, 4), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def on_ranks(body, held, **options):
    return lt.run(body, list(held), ranks=len(held), **options).values


def assert_same_bits(found, expected):
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


ALL_REDUCES = {
    "one_shot": lambda x: OPS.one_shot_all_reduce(share(x), "sum", world()),
    "one_shot_out": lambda x: OPS.one_shot_all_reduce_out(share(x), "sum", world(), torch.empty_like(x)),
    "one_shot_copy": lambda x: OPS.one_shot_all_reduce_copy(share(torch.zeros(60, dtype=x.dtype)), x, "sum", world()),
    "one_shot_copy_out": lambda x: OPS.one_shot_all_reduce_copy_out(
        share(torch.zeros(60, dtype=x.dtype)), x, "sum", world(), torch.empty_like(x)
    ),
    "two_shot": lambda x: OPS.two_shot_all_reduce_(share(x), "sum", world()).clone(),
    "two_shot_out": lambda x: OPS.two_shot_all_reduce_out(share(x), "sum", world(), torch.empty_like(x)),
    "multimem": lambda x: OPS.multimem_all_reduce_(share(x), "sum", world()).clone(),
    "multimem_one_shot": lambda x: OPS.multimem_one_shot_all_reduce(share(x), "sum", world()),
    "multimem_one_shot_out": lambda x: OPS.multimem_one_shot_all_reduce_out(
        share(x), "sum", world(), torch.empty_like(x)
    ),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_each_all_reduce_is_the_sum_in_group_order(name, schedule):
    for ranks in RANKS:
        for dtype in (torch.float64, torch.bfloat16):
            held = inputs(ranks, dtype=dtype)
            total = meaning.fold(held, wide=name.startswith("multimem"))
            assert_same_bits(on_ranks(ALL_REDUCES[name], held, schedule=schedule), [total] * ranks)


def test_multicast_memory_adds_bfloat16_in_float32():
    held = inputs(4, dtype=torch.bfloat16)
    total = torch.stack([x.double() for x in held]).sum(0).float().bfloat16()
    assert_same_bits([meaning.fold(held, wide=True)], [total])
    assert not torch.equal(meaning.fold(held), total)


OTHERS = {
    "multimem_one_shot_reduce_out": (
        lambda x: OPS.multimem_one_shot_reduce_out(share(x), "sum", 0, world(), torch.zeros_like(x)),
        lambda held: [meaning.fold(held), *(torch.zeros_like(x) for x in held[1:])],
    ),
    "multimem_all_gather_out": (
        lambda x: OPS.multimem_all_gather_out(x, world(), share(x.repeat(dist.get_world_size(), 1))).clone(),
        meaning.all_gather,
    ),
    "reduce_scatter_out": (
        lambda x: OPS.reduce_scatter_out(share(x), world(), False, x.chunk(dist.get_world_size())[0].clone()),
        meaning.reduce_scatter,
    ),
    "reduce_scatter_out, last dim": (
        lambda x: OPS.reduce_scatter_out(share(x.T), world(), True, x.T.chunk(dist.get_world_size(), -1)[0].clone()),
        lambda held: meaning.reduce_scatter([x.T for x in held], dim=-1),
    ),
    "nvshmem_broadcast": (
        lambda x: OPS.nvshmem_broadcast(share(x), 0, world()).clone(),
        lambda held: meaning.broadcast(held, 0),
    ),
    "nvshmem_all_to_all": (
        lambda x: OPS.nvshmem_all_to_all(share(x), share(torch.zeros_like(x)), world()).clone(),
        meaning.all_to_all,
    ),
    "_low_contention_all_gather": (lambda x: wait(OPS._low_contention_all_gather(x, world())), meaning.all_gather),
    "_low_contention_all_gather, symmetric": (
        lambda x: wait(OPS._low_contention_all_gather(share(x), world())),
        meaning.all_gather,
    ),
    "get_remote_tensors": (lambda x: gathered(share(x)), meaning.all_gather),
}


def wait(x):
    return torch.ops._c10d_functional.wait_tensor(x)


def gathered(x):
    dist.barrier()
    whole = torch.cat(OPS.get_remote_tensors(x, world()))
    dist.barrier()
    return whole


@pytest.mark.few(12)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OTHERS)
def test_each_other_op_has_its_meaning(name, schedule):
    run, means = OTHERS[name]
    for ranks in RANKS:
        held = inputs(ranks, (24, 4))
        assert_same_bits(on_ranks(run, held, schedule=schedule), means(held))


@pytest.mark.parametrize(("shape", "last_dim"), [((48,), False), ((2, 48), True)])
def test_a_scatter_in_broken_steps_of_16_bytes_is_refused_as_by_torch(shape, last_dim):
    def program():
        x = share(torch.zeros(shape, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="is 48, and has to be divisible by 32"):
            OPS.reduce_scatter_out(x, world(), last_dim, torch.zeros(12, dtype=torch.bfloat16))

    lt.run(program, ranks=4)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_low_contention_reduce_scatter_reduces(op, symmetric):
    for ranks in RANKS:
        held = inputs(ranks)
        found = on_ranks(
            lambda x: wait(OPS._low_contention_reduce_scatter(share(x) if symmetric else x, op, world())), held
        )
        for mine, right in zip(found, meaning.reduce_scatter(held, op), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-14, atol=1e-14)


def test_tiles_are_reduced_on_their_roots():
    def program(x):
        grid, out = share(x), torch.zeros(2, 2, dtype=x.dtype)
        OPS.tile_reduce(grid[1:3, 1:3], out, 1, world())
        own = torch.zeros(2, 2, dtype=x.dtype)
        OPS.multi_root_tile_reduce([grid[:2, :2], grid[2:4, 2:4]], own, [0, 1], world())
        return out, own

    held = inputs(2)
    total = meaning.fold(held)
    first, second = on_ranks(program, held)
    assert_same_bits([first[0], first[1]], [torch.zeros(2, 2, dtype=torch.float64), total[:2, :2]])
    assert_same_bits([second[0], second[1]], [total[1:3, 1:3], total[2:4, 2:4]])


@pytest.mark.skipif(not hasattr(symm_mem, "reduce_scatter_offset"), reason="this torch has no such function")
def test_blocks_are_reduced_on_the_ranks_that_own_them():
    def program(x):
        symm_mem.set_backend("NCCL")
        grid, rank = share(x), dist.get_rank()
        out = [torch.zeros(12, 1, dtype=x.dtype) for _ in range(2)]
        owners = [1, 0, 1, 0]
        symm_mem.reduce_scatter_offset(grid, out, world(), dim=1, offsets=[1, 2, 3, 4], dst_ranks=owners)
        return torch.cat(out, 1), [at for at, owner in enumerate(owners) if owner == rank]

    held = inputs(2)
    for out, columns in on_ranks(program, held):
        assert_same_bits([out], [meaning.fold(held)[:, columns]])


def test_put_get_and_their_signals_on_nvshmem_and_nccl():
    def program():
        rank = dist.get_rank()
        x, flags = share(torch.full((4,), float(rank))), share(torch.zeros(1, dtype=torch.int64))
        pad = symm_mem.rendezvous(x, world()).get_signal_pad(rank, (1,), torch.int64, 8)
        seen = []
        for put, get, signalled, waited in (
            (OPS.nvshmem_put, OPS.nvshmem_get, lambda: OPS.nvshmem_put_with_signal(x, pad, 5, 1), lambda: OPS.nvshmem_wait_for_signal(pad, 5, 0)),
            (OPS.nccl_put, OPS.nccl_get, lambda: OPS.nccl_put_with_signal(x, 7, 1), lambda: OPS.nccl_wait_for_signal(x, 7)),
        ):  # fmt: skip
            dist.barrier()
            if rank == 0:
                put(x, 1)
            dist.barrier()
            seen.append(x[0].item())
            x.fill_(rank + 10)
            dist.barrier()
            if rank == 1:
                get(x, 0)
            dist.barrier()
            seen.append(x[0].item())
            x.fill_(rank + 20)
            dist.barrier()
            signalled() if rank == 0 else waited()
            seen.append(x[0].item())
            dist.barrier()
        assert flags.item() == 0
        return seen

    for schedule in SCHEDULES:
        assert lt.run(program, ranks=2, schedule=schedule).values == ([0, 10, 20, 20, 10, 20], [0, 10, 20, 20, 10, 20])


def test_torchs_one_sided_functions_put_and_wait():
    def program():
        symm_mem.set_backend("NCCL")
        x = share(torch.zeros(3))
        handle = symm_mem.rendezvous(x, world())
        if handle.rank == 0:
            symm_mem.put_signal(torch.arange(3.0), handle, 1)
        else:
            symm_mem.wait_signal(handle, 0)
        OPS._barrier(handle)
        assert OPS._rendezvous(x, world()).rank == handle.rank
        return x.tolist()

    assert lt.run(program, ranks=2).values[1] == [0, 1, 2]


def splits_of(ranks, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 4, (ranks * experts,), generator=generator) for _ in range(ranks)]


def routed(held, splits, call, lines):
    def program(x, mine):
        rows = share(torch.cat([x, x.new_zeros(64 - len(x), x.shape[1])]))
        out, table = share(torch.zeros(128, x.shape[1], dtype=x.dtype)), share(torch.zeros(2, lines, dtype=torch.int64))
        call(rows, out, share(mine), table)
        return out.clone(), table.clone()

    return lt.run(program, list(held), list(splits), ranks=len(held)).values


def check_routes(found, expected):
    for (out, table), (rows, counts, offsets) in zip(found, expected, strict=True):
        assert_same_bits([table[0], table[1]], [counts, offsets])
        for count, offset in zip(counts.tolist(), offsets.tolist()):
            assert_same_bits([out[offset : offset + count]], [rows[offset : offset + count]])


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_of_unequal_numbers_are_exchanged(ranks):
    splits = splits_of(ranks, 1, ranks)
    held = [torch.randn(int(mine.sum()), 2) for mine in splits]
    found = routed(held, splits, lambda *parts: OPS.all_to_all_vdev(*parts, world()), ranks)
    check_routes(found, meaning.all_to_all_v(held, splits))


@pytest.mark.parametrize("align", [None, 4])
@pytest.mark.parametrize("ranks", RANKS)
def test_rows_go_to_the_experts_and_come_back(ranks, align):
    experts, splits = 3, splits_of(ranks, 3, ranks)
    held = [torch.randn(int(mine.sum()), 2) for mine in splits]
    lines = ranks * experts
    there = routed(held, splits, lambda *parts: OPS.all_to_all_vdev_2d(*parts, world(), align), lines)
    check_routes(there, meaning.all_to_all_v_2d(held, splits, align or 1))
    tables = [table for _, table in there]
    back = routed(
        [out[:64] for out, _ in there], tables, lambda *parts: OPS.all_to_all_vdev_2d_offset(*parts, world()), lines
    )
    check_routes(
        back, meaning.all_to_all_v_2d_offset([out for out, _ in there], [t[0] for t in tables], [t[1] for t in tables])
    )
    for (out, _), rows in zip(back, held, strict=True):
        assert_same_bits([out[: len(rows)]], [rows])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_pipeline_of_all_gather_and_matmul_is_its_meaning(dim, dtype):
    for ranks in RANKS:
        held = inputs(ranks, (2, 4, 8), dtype)
        width = 8 * (ranks if dim == 2 else 1)
        weights = [inputs(2, (width, 3), dtype, seed=9 + rank) for rank in range(ranks)]
        found = lt.run(
            lambda x, mine: OPS.fused_all_gather_matmul(x, list(mine), dim, world()),
            held,
            [tuple(w) for w in weights],
            ranks=ranks,
        ).values
        for (whole, products), (right, each) in zip(found, meaning.all_gather_matmul(held, weights, dim), strict=True):
            assert_same_bits([whole], [right])
            for mine, product in zip(products, each, strict=True):
                tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.1, "atol": 0.2}
                torch.testing.assert_close(mine, product, **tolerance)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_pipeline_of_matmul_and_reduce_scatter_is_its_meaning(dim, op):
    for ranks in (1, 2, 4):
        held, weights = inputs(ranks, (4, 8, 3)), inputs(ranks, (3, 12), seed=9)
        found = lt.run(
            lambda x, weight: OPS.fused_matmul_reduce_scatter(x, weight, op, dim, world()), held, weights, ranks=ranks
        ).values
        for mine, right in zip(found, meaning.matmul_reduce_scatter(held, weights, op, dim), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_pipelines_run_under_other_schedules_and_reuse_their_workspace():
    def program(x, weight):
        for _ in range(3):
            whole, (product,) = OPS.fused_all_gather_matmul(x, [weight], 0, world())
            part = OPS.fused_matmul_reduce_scatter(whole, weight, "sum", 0, world())
        return product, part

    held, weights = inputs(4, (4, 3)), [inputs(1, (3, 4), seed=7)[0]] * 4
    texts = set()
    for schedule in (*SCHEDULES, "shuffled:11"):
        values = lt.run(program, held, weights, ranks=4, schedule=schedule).values
        texts.add(str(values))
    assert len(texts) == 1


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_pipeline_without_one_of_its_barriers_races(skipped, monkeypatch):
    """The accesses inside of torch's pipelines are checked: without this barrier a peer reads too early or too late."""
    barrier = SymmetricHandle.barrier

    def sometimes(handle, channel=0, timeout_ms=0):
        if channel != skipped:
            barrier(handle, channel, timeout_ms)

    monkeypatch.setattr(SymmetricHandle, "barrier", sometimes)

    def program(x, weight):
        for _ in range(2):
            OPS.fused_all_gather_matmul(x, [weight], 0, world())

    with pytest.raises(SymmetricRace) as caught:
        lt.run(program, inputs(2, (4, 3)), inputs(2, (3, 4)), ranks=2)
    assert {place.function for place in caught.value.places} == {"program"}


def test_a_chunk_that_is_produced_while_a_peer_still_reads_it_races(monkeypatch):
    """`_pipelined_produce_and_all2all` has two barriers a step; its second keeps a buffer until all peers have read it."""
    barrier, seen = SymmetricHandle.barrier, {}

    def every_other(handle, channel=0, timeout_ms=0):
        key = (handle.rank, channel)
        seen[key] = seen.get(key, 0) + 1
        if channel == 0 or seen[key] % 2:
            barrier(handle, channel, timeout_ms)

    monkeypatch.setattr(SymmetricHandle, "barrier", every_other)
    with pytest.raises(SymmetricRace):
        lt.run(
            lambda x, weight: OPS.fused_matmul_reduce_scatter(x, weight, "sum", 0, world()),
            inputs(4, (8, 3)),
            inputs(4, (3, 4)),
            ranks=4,
        )


@pytest.mark.skipif(
    not hasattr(symm_mem, "reduce_scatter_offset"), reason="torch 2.11 scales whole tensors only on the CPU"
)
@pytest.mark.parametrize("rowwise", [False, True])
def test_the_scaled_pipelines_are_their_meaning(rowwise):
    def program(x, weight):
        a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).T.contiguous().T
        scale_a = torch.full((len(x), 1) if rowwise else (), 0.5)
        scale_b = torch.full((1, 16) if rowwise else (), 2.0)
        _, (product,) = OPS.fused_all_gather_scaled_matmul(
            a, [b], scale_a, [scale_b], 0, world(), [None], [None], [torch.float32], [False]
        )
        part = OPS.fused_scaled_matmul_reduce_scatter(
            a, b, scale_a, scale_b, "sum", 0, 0, world(), [len(x), 16], out_dtype=torch.float32
        )
        return product, part

    held = [torch.randint(-4, 5, (32, 16)).float() for _ in range(2)]
    weights = [torch.randint(-4, 5, (16, 16)).float() for _ in range(2)]
    whole = torch.cat(held)
    parts = meaning.matmul_reduce_scatter(held, weights)
    for rank, (product, part) in enumerate(lt.run(program, held, weights, ranks=2).values):
        assert_same_bits([product, part], [whole @ weights[rank], parts[rank]])


def test_the_fallback_of_torchs_test_mode_is_the_same_program():
    def program(x, weight, mocked):
        if not mocked:
            return OPS.fused_all_gather_matmul(x, [weight], 0, world())[1][0]
        with symm_mem._test_mode():
            return OPS.fused_all_gather_matmul(x, [weight], 0, world())[1][0]

    held, weights = inputs(2), inputs(2, (4, 3))
    assert_same_bits(
        lt.run(program, held, weights, True, ranks=2).values, lt.run(program, held, weights, False, ranks=2).values
    )


def test_words_are_written_one_after_another():
    def program():
        x = torch.zeros(6, dtype=torch.uint32)
        OPS.memset32_(x, 1, 7, 3)
        OPS.stream_write_value32_(x, 5, 2**32 - 1)
        for call, problem in (
            (lambda: OPS.memset32_(x, 5, 1, 2), "exceeded the numel"),
            (lambda: OPS.memset32_(x, -1, 1, 2), "offset must be"),
            (lambda: OPS.memset32_(x, 0, 1, 0), "count must be"),
            (lambda: OPS.stream_write_value32_(x, 0, 2**32), "val must be"),
            (lambda: OPS.memset32_(x.view(2, 3), 0, 1, 1), "flat, contiguous uint32"),
            (lambda: OPS.memset32_(x.view(torch.float32), 0, 1, 1), "flat, contiguous uint32"),
        ):
            with pytest.raises(RuntimeError, match=problem):
                call()
        return x.tolist()

    assert lt.run(program, ranks=1).values == ([0, 7, 7, 7, 0, 2**32 - 1],)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: OPS.one_shot_all_reduce(torch.ones(2), "sum", world()), NotSymmetric),
        (lambda: OPS.one_shot_all_reduce(share(torch.ones(2)), "max", world()), UnknownReduction),
        (lambda: OPS._async_input_mm(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2), 0), NotServed),
    ],
)
def test_what_an_op_does_not_take_is_refused(call, kind):
    with pytest.raises(RankRaised) as caught:
        lt.run(call, ranks=2)
    assert isinstance(caught.value.__cause__, kind)


def test_outside_of_ranks_an_op_is_refused_by_name():
    lt.run(lambda: None, ranks=1)
    with pytest.raises(NotServed, match=r"symm_mem::one_shot_all_reduce: .*this thread is no rank"):
        OPS.one_shot_all_reduce(torch.ones(2), "sum", "0")


def test_every_op_of_this_torch_is_served():
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("symm_mem::")
    }
    assert names - {*KERNELS, *OF_HANDLES} == set()
