"""Whether two tensors share an element."""

from torch import Tensor


def overlap(a: Tensor, b: Tensor) -> bool:
    """The two share an element, or a part of one.  Of strided ones whose ranges cross, only small ones are looked at one by one."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not a.numel() or not b.numel():
        return False
    first, second = _range(a), _range(b)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    if max(a.numel(), b.numel()) > 1 << 16:
        return first == second and a.stride() == b.stride()
    unit = min(a.element_size(), b.element_size())  # the imaginary parts of a buffer begin in the midst of its elements
    return bool(_units(a, unit) & _units(b, unit))


def _range(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    start = int(x.storage_offset())
    return start * x.element_size(), (start + last + 1) * x.element_size()


def _units(x: Tensor, unit: int) -> set[int]:
    """The places in memory that the elements fill, counted in so many bytes."""
    many = x.element_size() // unit
    offsets = [int(x.storage_offset())]
    for size, stride in zip(x.shape, x.stride()):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return {offset * many + part for offset in offsets for part in range(many)}
