"""A small book for tests of overlays: rules that are right, and some that are wrong on purpose, or no rules at all."""

from torch.distributed.tensor import Partial, Shard

from strategies.ops.semantics.rule_registry import RuleRegistry, rules


def rows(query):
    """Each element by itself, for tensors of one shape."""
    for d in range(query.outputs[0].ndim):
        yield query.line(dict.fromkeys(range(len(query.tensors)), Shard(d)), [Shard(d)])


def sums(query):
    yield from rows(query)
    if query.get("alpha") in (None, 1):
        yield query.line(dict.fromkeys(range(len(query.tensors)), Partial("sum")), [Partial("sum")])


def scan(query):
    (dim,) = query.dims("dim")
    for d in range(query.tensors[0].ndim):
        if d != dim:
            yield query.line(dict.fromkeys(range(len(query.tensors)), Shard(d)), [Shard(d)])


def nothing(query):
    return ()


def wrong_scan(query):
    """What DTensor 2.13 says: each rank by itself, along the very dim."""
    yield query.line({0: Shard(0)}, [Shard(0)])


ROWS = rules("rows", "each element by itself", [
    "aten.__lshift__.Scalar", "aten.mul.Tensor", "aten.mul_.Tensor", "aten.exp.default", "aten.mul.out",
    "aten.rand_like.default", "aten.fill_.Scalar",
], rows)  # fmt: skip
SCANS = rules("scans", "each column by itself", ["aten.cumsum.default", "aten.cumsum.out"], scan)
SUMS = rules("sums", "linear in both", ["aten.add.Tensor", "aten.add_.Tensor"], sums)
VIEWS = rules("sizes", "each row by itself", ["aten.new_zeros.default"], lambda query: [
    query.line({}, [Shard(d)]) for d in range(len(query.outputs[0].shape))
], shapes=["size"])  # fmt: skip
RIGHT = RuleRegistry.of(*ROWS, *SCANS, *SUMS, *VIEWS)
REPLICATED = RuleRegistry.of(*rules("none", "nothing is known", ["aten.cumsum.default"], nothing))
WRONG = RuleRegistry.of(*rules("wrong", "as DTensor 2.13 has it", ["aten.cumsum.default"], wrong_scan))
