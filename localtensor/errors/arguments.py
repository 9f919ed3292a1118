"""Refusals of what a caller writes: placements, meshes, dims, pieces."""

from collections.abc import Sequence

from localtensor.errors.base import LocalTensorError, refusal

MOST_SHAPES = 8  # in a message; of more ranks, the first that differs is named


class BadPlacement(LocalTensorError):
    """A placement that cannot be read, or that the tensor cannot have."""

    def __init__(self, call: str, text: str, problem: str, remedy: str = "") -> None:
        remedy = (
            remedy
            or "Write R, S(0), SS(0,2), P(sum), P(avg), P(min), P(max), P(product), or pass torch's own placement."
        )
        super().__init__(refusal(call, "placement", repr(text), problem, remedy))


class BadMesh(LocalTensorError):
    """Mesh sizes or names that make no mesh, or an axis, rank or place that a mesh does not have."""

    def __init__(self, call: str, values: str, problem: str, argument: str = "mesh", remedy: str = "") -> None:
        remedy = remedy or "Give each axis a size of at least 1 and a name of its own, as in Mesh.of(dp=2, tp=4)."
        super().__init__(refusal(call, argument, values, problem, remedy))


class NoSuchDim(LocalTensorError):
    """A tensor dim that the shape does not have."""

    def __init__(self, call: str, dim: int, shape: Sequence[int]) -> None:
        have = f"dims 0 to {len(shape) - 1}" if shape else "no dims"
        problem = f"a tensor of {len(shape)} dims has {have}"
        super().__init__(refusal(call, "dim", f"dim={dim} of shape {tuple(shape)}", problem, "Name one of those dims."))


class WrongPieces(LocalTensorError):
    """The ranks' pieces do not make up one tensor of the spec's shape."""

    def __init__(self, call: str, got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> None:
        values, problem = f"pieces of shapes {_few(got)}", f"the spec asks for {_few(want)}"
        odd = [rank for rank, (mine, theirs) in enumerate(zip(got, want, strict=False)) if tuple(mine) != tuple(theirs)]
        if odd and len(got) > MOST_SHAPES:
            problem += f", {tuple(want[odd[0]])} and not {tuple(got[odd[0]])} of rank {odd[0]}"
        super().__init__(refusal(call, "pieces", values, problem, "Give rank i the piece that split gives it."))


class WrongShape(WrongPieces):
    """A tensor that is to be split by a spec of another shape."""

    def __init__(self, call: str, got: Sequence[int], want: Sequence[int]) -> None:
        remedy = "Pass a tensor of that shape, or a spec of this one."
        problem = f"the spec is of shape {tuple(want)}"
        LocalTensorError.__init__(self, refusal(call, "x", f"shape {tuple(got)}", problem, remedy))


def _few(shapes: Sequence[Sequence[int]]) -> str:
    over = len(shapes) - MOST_SHAPES
    shown = ", ".join(str(tuple(shape)) for shape in shapes[:MOST_SHAPES])
    return f"[{shown} and {over} more]" if over > 0 else f"[{shown}]"


class NotReducible(LocalTensorError):
    """A partial value of this dtype has no meaning under this reduction."""

    def __init__(self, call: str, kind: str, dtype: object) -> None:
        problem = f"{kind} of {dtype} is not defined"
        super().__init__(
            refusal(call, "placement", f"P({kind}) of {dtype}", problem, "Choose another dtype or reduction.")
        )


class BadShardOrder(LocalTensorError):
    """A shard order that names other axes than those that cut a dim."""

    def __init__(self, values: str, problem: str) -> None:
        remedy = "Give each such dim once, with the axes that cut it, as in ((0, (1, 0)),), or pass shard_order=()."
        super().__init__(refusal("Spec", "shard_order", values, problem, remedy))


class OtherRows(LocalTensorError):
    """A spec that cannot be written in another way without some rank holding other rows."""

    def __init__(self, call: str, values: str, problem: str, remedy: str, argument: str = "spec") -> None:
        super().__init__(refusal(call, argument, values, problem, remedy))
