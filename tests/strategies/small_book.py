"""A small book for tests of overlays: rules that are right, and some that are wrong on purpose, or no rules at all."""

from torch.distributed.tensor import Partial, Shard

from strategies.ops.semantics.rulebook import RuleRegistry, rules


def rows(ask):
    """Each element by itself, for tensors of one shape."""
    for d in range(ask.outputs[0].ndim):
        yield ask.line(dict.fromkeys(range(len(ask.tensors)), Shard(d)), [Shard(d)])


def sums(ask):
    yield from rows(ask)
    if ask.get("alpha") in (None, 1):
        yield ask.line(dict.fromkeys(range(len(ask.tensors)), Partial("sum")), [Partial("sum")])


def scan(ask):
    (dim,) = ask.dims("dim")
    for d in range(ask.tensors[0].ndim):
        if d != dim:
            yield ask.line(dict.fromkeys(range(len(ask.tensors)), Shard(d)), [Shard(d)])


def nothing(ask):
    return ()


def wrong_scan(ask):
    """What DTensor 2.13 says: each rank by itself, along the very dim."""
    yield ask.line({0: Shard(0)}, [Shard(0)])


ROWS = rules("rows", "each element by itself", [
    "aten.__lshift__.Scalar", "aten.mul.Tensor", "aten.mul_.Tensor", "aten.exp.default", "aten.mul.out",
    "aten.rand_like.default", "aten.fill_.Scalar",
], rows)  # fmt: skip
SCANS = rules("scans", "each column by itself", ["aten.cumsum.default", "aten.cumsum.out"], scan)
SUMS = rules("sums", "linear in both", ["aten.add.Tensor", "aten.add_.Tensor"], sums)
VIEWS = rules("sizes", "each row by itself", ["aten.new_zeros.default"], lambda ask: [
    ask.line({}, [Shard(d)]) for d in range(len(ask.outputs[0].shape))
], shapes=["size"])  # fmt: skip
RIGHT = RuleRegistry.of(*ROWS, *SCANS, *SUMS, *VIEWS)
REPLICATED = RuleRegistry.of(*rules("none", "nothing is known", ["aten.cumsum.default"], nothing))
WRONG = RuleRegistry.of(*rules("wrong", "as DTensor 2.13 has it", ["aten.cumsum.default"], wrong_scan))
