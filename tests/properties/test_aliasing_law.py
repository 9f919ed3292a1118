"""A law: views, writes and collectives in lockstep leave on each rank what they leave on plain tensors of its own.

A machine makes tensors that are the same on all ranks, differ, are of different sizes or come from outside of the
mode, takes views of them and of views, and writes through any of them.  The model has a plain tensor for each rank
and does the same calls on each.  After each step, every tensor alive is compared on every rank: elements, shape,
strides, place in memory, and what shares memory with what.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from localtensor.errors import NotInLockstep, OutsideWrite, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor

WORLD = 4
MOST_ALIVE = 8
DTYPES = (torch.float64, torch.int64, torch.complex128)
SHAPES = ((), (3,), (4,), (2, 3), (1, 3), (3, 1, 2), (2, 2, 2), (0, 2), (4, 4))

VIEWS = {
    "whole": lambda t: t[...],
    "tail": lambda t: t[1:],
    "every other": lambda t: t[::2],
    "last": lambda t: t[-1],
    "first": lambda t: t.select(0, 0),
    "column": lambda t: t[..., 0],
    "transposed": lambda t: t.transpose(0, -1),
    "T": lambda t: t.t(),
    "H": lambda t: t.transpose(-2, -1).conj(),
    "permuted": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "expanded": lambda t: t.expand(2, *t.shape),
    "one more dim": lambda t: t.unsqueeze(-1),
    "squeezed": lambda t: t.squeeze(),
    "squeezed at 0": lambda t: t.squeeze(0),
    "strided": lambda t: t.as_strided((2,), (1,)),
    "strided, farther": lambda t: t.as_strided((2, 1), (1, 1), 1),
    "diagonal": lambda t: t.diagonal(),
    "unbound": lambda t: t.unbind()[-1],
    "split": lambda t: t.split(1)[0],
    "chunk": lambda t: t.chunk(2, -1)[-1],
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "flat": lambda t: t.view(-1),
    "reshaped": lambda t: t.reshape(-1),
    "unflattened": lambda t: t.unflatten(0, (2, -1)),
    "windows": lambda t: t.unfold(0, 2, 1),
    "real": lambda t: t.real,
    "imaginary": lambda t: t.imag,
    "conjugate": lambda t: t.conj(),
    "as real": torch.view_as_real,
    "as complex": torch.view_as_complex,
    "as bytes": lambda t: t.view(torch.uint8),
    "as ints": lambda t: t.view(torch.int32),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
    "negative": torch._neg_view,
}
COPIES_IF_IT_MUST = ("contiguous", "reshaped")
BY_RANK = {  # these take another view on each rank
    "tail from the rank": lambda t, rank: t[rank:],
    "head to the rank": lambda t, rank: t[:rank],
    "narrow at the rank": lambda t, rank: t.narrow(0, rank, 1),
    "select at the rank": lambda t, rank: t.select(0, rank),
    "indexed by the rank": lambda t, rank: t[..., rank] if isinstance(t, LocalTensor) else t.select(-1, rank),
}
IN_PLACE_VIEWS = {
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "squeeze_": lambda t: t.squeeze_(),
    "squeeze_(0)": lambda t: t.squeeze_(0),
    "transpose_": lambda t: t.transpose_(0, -1),
    "swapaxes_": lambda t: t.swapaxes_(-1, 0),
    "as_strided_": lambda t: t.as_strided_((2,), (1,)),
}
WRITES = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(7),
    "add a number": lambda t: t.add_(3),
    "mul": lambda t: t.mul_(-1),
    "abs": lambda t: t.neg_(),
    "an item": lambda t: t.__setitem__(0, 5),
    "index_put_": lambda t: t.index_put_((torch.tensor([0, 0]),), torch.ones((), dtype=t.dtype), accumulate=True),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 9),
    "clamp": lambda t: t.clamp_(-2, 2),
    "cumsum": lambda t: t.cumsum_(0),
    "masked": lambda t: t.masked_fill_(t == 3, 4),
    "uniform operand": lambda t: t.add_(torch.ones((), dtype=t.dtype)),
    "foreach": lambda t: torch._foreach_add_([t], 2),
    "through data": lambda t: t.data.add_(1),
    "through a view": lambda t: t[..., :1].add_(1),
}
WITH_OTHER = {
    "copy_": lambda t, other: t.copy_(other),
    "add_": lambda t, other: t.add_(other),
    "sub_ of a sum": lambda t, other: t.sub_(other.sum()),
    "an item of another": lambda t, other: t.__setitem__((0, ...), other),
    "foreach of another": lambda t, other: torch._foreach_add_([t], [other]),
    "out": lambda t, other: torch.add(t, other, out=t),
    "where": lambda t, other: t.copy_(torch.where(t == other, t, other)),
    "masked by another": lambda t, other: t.masked_fill_(other == other.clone().fill_(3), 1),
    "data of another": lambda t, other: t.data.mul_(other),
}


def numbers(shape, dtype, seed):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + seed * 5) % 9 - 4).reshape(shape).to(dtype)


class Alive:
    """A tensor, the plain one of each rank, and whether it lies in memory from outside of the mode."""

    def __init__(self, x, model, outside=False):
        self.x, self.model, self.outside = x, model, outside


def tried(call, *operands):
    """What a call gives on each rank's plain tensors, or None if it cannot be done on all."""
    try:
        return [call(*of_rank) for of_rank in zip(*operands, strict=True)]
    except (RuntimeError, IndexError, ValueError, TypeError, UserWarning):
        return None


def uneven(one):
    return len({(t.shape, t.stride()) for t in one.model}) > 1


def twins(model):
    """Copies that lie as the originals do, each in a memory of its own."""
    found = []
    for t in model:
        storage = t.untyped_storage().clone()
        twin = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
        torch._C._set_conj(twin, t.is_conj())
        torch._C._set_neg(twin, t.is_neg())
        found.append(twin)
    return found


def where(t):
    return t.untyped_storage().data_ptr()


class Aliasing(RuleBasedStateMachine):
    picks = st.integers(0, MOST_ALIVE - 1)

    @initialize()
    def enter(self):
        self.alive: list[Alive] = []
        self.mode = LocalTensorMode(WORLD).__enter__()
        self.pairs = dist.new_group([1, 3])

    def teardown(self):
        if hasattr(self, "mode"):
            self.mode.__exit__(None, None, None)

    def plain(self, make):
        """What `make` gives with no mode at work."""
        with self.mode.disable():
            return make()

    def keep(self, x, model, outside=False):
        if len(self.alive) >= MOST_ALIVE:
            self.alive.pop(0)
        self.alive.append(Alive(x, model, outside))

    def at(self, pick):
        return self.alive[pick % len(self.alive)]

    # -- new tensors

    @rule(shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 8))
    def the_same_on_all(self, shape, dtype, seed):
        model = self.plain(lambda: [numbers(shape, dtype, seed) for _ in range(WORLD)])
        self.keep(numbers(shape, dtype, seed), model)

    @rule(
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        seeds=st.lists(st.integers(0, 3), min_size=WORLD, max_size=WORLD),
        lain=st.sampled_from(["by rows", "by columns", "either way"]),
    )
    def by_rank(self, shape, dtype, seeds, lain):
        def make(seed):
            if lain == "by rows" or (lain == "either way" and seed % 2):
                return numbers(shape, dtype, seed)
            return numbers(shape[::-1], dtype, seed).permute(tuple(reversed(range(len(shape)))))

        shared = self.plain(lambda: {seed: make(seed) for seed in set(seeds)})
        self.keep(rank_map(lambda rank: shared[seeds[rank]]), self.plain(lambda: twins([make(s) for s in seeds])))

    @rule(sizes=st.lists(st.integers(0, 3), min_size=WORLD, max_size=WORLD), dtype=st.sampled_from(DTYPES))
    def uneven(self, sizes, dtype):
        model = self.plain(lambda: [numbers((size, 2), dtype, size) for size in sizes])
        self.keep(rank_map(lambda rank: model[rank].clone()), model)

    @rule(shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 8))
    def from_outside(self, shape, dtype, seed):
        make = lambda: numbers(shape, dtype, seed)  # noqa: E731
        self.keep(self.plain(make), self.plain(lambda: [make() for _ in range(WORLD)]), outside=True)

    # -- views

    @precondition(lambda self: self.alive)
    @rule(pick=picks, name=st.sampled_from(sorted(VIEWS)))
    def view(self, pick, name):
        old = self.at(pick)
        model = self.plain(lambda: tried(VIEWS[name], old.model))
        if name in COPIES_IF_IT_MUST and len({t.is_contiguous() for t in old.model}) > 1:
            return  # where one rank needs a copy, all have one
        if model is not None:
            shares = any(where(t) == where(base) for t, base in zip(model, old.model, strict=True))
            self.seen(lambda: VIEWS[name](old.x), model, old, shares)

    def seen(self, view, model, old, shares=True):
        """The view is kept, unless ranks of different sizes need a control flow of their own for it."""
        try:
            x = view()
        except (NotInLockstep, RanksDiverge):
            assert uneven(old)
        else:
            self.keep(x, model, old.outside and shares)

    @precondition(lambda self: self.alive)
    @rule(pick=picks, name=st.sampled_from(sorted(BY_RANK)))
    def view_by_rank(self, pick, name):
        old = self.at(pick)
        model = self.plain(lambda: tried(BY_RANK[name], old.model, range(WORLD)))
        if model is not None:
            self.seen(lambda: BY_RANK[name](old.x, dist.get_rank()), model, old)

    @precondition(lambda self: self.alive)
    @rule(pick=picks, name=st.sampled_from(sorted(IN_PLACE_VIEWS)))
    def view_in_place(self, pick, name):
        old = self.at(pick)
        change = IN_PLACE_VIEWS[name]
        if self.plain(lambda: tried(change, twins(old.model))) is not None:
            try:
                change(old.x)
            except (NotInLockstep, RanksDiverge):
                assert uneven(old)
            else:
                self.plain(lambda: tried(change, old.model))

    # -- writes

    @precondition(lambda self: self.alive)
    @rule(pick=picks, name=st.sampled_from(sorted(WRITES)))
    def write(self, pick, name):
        self.written(self.at(pick), WRITES[name], [])

    @precondition(lambda self: self.alive)
    @rule(pick=picks, other=picks, name=st.sampled_from(sorted(WITH_OTHER)))
    def write_another(self, pick, other, name):
        target, source = self.at(pick), self.at(other)
        pairs = zip(target.model, source.model, strict=True)
        if target is source or all(where(t) != where(s) for t, s in pairs):  # else torch promises nothing
            self.written(target, WITH_OTHER[name], [source])

    def written(self, target, change, others):
        if any(torch._debug_has_internal_overlap(t) == 1 for t in target.model):
            return
        mine = self.plain(lambda: twins(target.model))
        if self.plain(lambda: tried(change, mine, *[mine if o is target else twins(o.model) for o in others])) is None:
            return
        try:
            change(target.x, *[o.x for o in others])
        except OutsideWrite:
            assert target.outside and any(many(one.x) for one in (target, *others))
        except (NotInLockstep, RanksDiverge):
            assert any(uneven(one) for one in (target, *others))
        else:
            self.plain(lambda: tried(change, target.model, *[o.model for o in others]))

    @precondition(lambda self: self.alive)
    @rule(pick=picks, other=picks)
    def given_the_data_of_another(self, pick, other):
        target, source = self.at(pick), self.at(other)
        if target.outside or target.model[0].dtype is not source.model[0].dtype:
            return
        target.x.data, target.outside = source.x, source.outside
        for t, s in zip(target.model, source.model, strict=True):
            t.data = s

    # -- collectives in place

    @precondition(lambda self: self.alive)
    @rule(pick=picks, pairs=st.booleans(), src=st.one_of(st.none(), st.sampled_from([1, 3])))
    def collective(self, pick, pairs, src):
        target = self.at(pick)
        ranks = [1, 3] if pairs else range(WORLD)
        brought = [target.model[rank] for rank in ranks]
        if not all(
            t.is_contiguous() and t.shape == brought[0].shape and not t.is_conj() and not t.is_neg() for t in brought
        ):
            return
        if any(torch._debug_has_internal_overlap(t) == 1 for t in brought):
            return
        try:
            if src is None:
                dist.all_reduce(target.x, group=self.pairs if pairs else None)
            else:
                dist.broadcast(target.x, src, group=self.pairs if pairs else None)
        except OutsideWrite:
            assert target.outside and (pairs or many(target.x))
            return
        total = self.plain(lambda: sum(brought) if src is None else target.model[src].clone())
        for t in brought:
            self.plain(lambda t=t: t.copy_(total))

    @precondition(lambda self: self.alive)
    @rule(pick=picks)
    def forget(self, pick):
        self.alive.remove(self.at(pick))

    # -- what must hold

    @invariant()
    def every_tensor_is_as_on_plain_ranks(self):
        for one in getattr(self, "alive", []):
            for rank, want in enumerate(one.model):
                self.plain(lambda one=one, rank=rank, want=want: check(one, rank, want))

    @invariant()
    def memory_is_shared_as_on_plain_ranks(self):
        for one in getattr(self, "alive", []):
            for other in self.alive:
                if isinstance(one.x, LocalTensor) and isinstance(other.x, LocalTensor):
                    alike = all(where(t) == where(s) for t, s in zip(one.model, other.model, strict=True))
                    if alike and where(one.model[0]) and not one.outside:
                        assert one.x is other.x or one.x._memory is other.x._memory is not None
                        assert one.x._partition is other.x._partition


def many(x):
    return isinstance(x, LocalTensor) and not x._partition.uniform


def check(one, rank, want):
    got = one.x if not isinstance(one.x, LocalTensor) else one.x.__localtensor_on__(rank)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert got.stride() == want.stride()
    assert got.is_conj() == want.is_conj() and got.is_neg() == want.is_neg()
    assert torch.equal(got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg()), (
        f"rank {rank}: {got}, {want}"
    )
    if isinstance(one.x, LocalTensor):
        cell = one.x._cells[one.x._partition.place(rank)[0]]
        assert cell.storage_offset() == want.storage_offset() or not want.numel()
        if not uneven(one):
            assert one.x.shape == want.shape and one.x.stride() == want.stride()
            assert one.x.is_contiguous() == want.is_contiguous()
            assert one.x.is_conj() == want.is_conj() and one.x.is_neg() == want.is_neg()


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_aliasing_is_that_of_each_ranks_own_tensors():
    check_machine(Aliasing)


def check_machine(machine):
    """Its own checks, after each step, on every live tensor and rank."""
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=25, report_multiple_bugs=False))
