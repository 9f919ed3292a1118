"""Random generators that a process has once and a real run has once per rank; each is a slot (see special_slots.py).

The public ways to save and load the generators of Python and NumPy are slow (7 and 20 microseconds).  So their state is
copied as bytes, if a check at import shows that the bytes are where CPython and NumPy 2.4 keep them.
"""

import ctypes
import importlib
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

_MERSENNE_BYTES = 2500  # bytes of a Mersenne Twister: 624 words and a position


class RankIdentity(Protocol):
    """The rank whose state it is."""

    rank: int
    ranks: int
    seed: int


class AlwaysReady:
    """A slot whose subject is always there."""

    def ready(self) -> bool:
        return True


class TorchGenerator(AlwaysReady):
    name = "torch_generator"
    why = "torch.manual_seed and every draw change the one generator of the process"

    def save(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def load(self, want: torch.Tensor, held: torch.Tensor) -> None:
        torch.default_generator.set_state(want)

    def initial(self, who: RankIdentity) -> torch.Tensor:
        return torch.Generator().manual_seed(who.seed).get_state()


class CudaGenerators:
    """One per device, from the initialisation of CUDA on.  A rank's first state then follows its last manual_seed."""

    name = "cuda_generators"
    why = "as for the CPU's, one for each device"

    def ready(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def save(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in torch.cuda.default_generators]

    def load(self, want: list[torch.Tensor], held: list[torch.Tensor]) -> None:
        for generator, state, now in zip(torch.cuda.default_generators, want, held):
            if not torch.equal(state, now):
                generator.set_state(state)

    def initial(self, who: RankIdentity) -> list[torch.Tensor]:
        return self._seeded(who.seed)

    def late(self, who: RankIdentity) -> list[torch.Tensor]:
        """As after the rank's last seed, which its CPU generator, already loaded, remembers."""
        return self._seeded(torch.initial_seed())

    def _seeded(self, seed: int) -> list[torch.Tensor]:
        return [
            torch.Generator(generator.device).manual_seed(seed).get_state()
            for generator in torch.cuda.default_generators
        ]


def python_state_view(generator: random.Random) -> Any:
    """The state of a Python generator as a ctypes array (`.raw`), or None if the memory layout is not the expected one."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _MERSENNE_BYTES:
        return None

    def view(of: random.Random) -> Any:
        return (ctypes.c_char * _MERSENNE_BYTES).from_address(id(of) + object.__basicsize__)

    probe = random.Random(20)  # a position, then 624 words; checked on a generator of our own
    for draws in (0, 1, 700):
        for _ in range(draws):
            probe.random()
        *words, position = probe.getstate()[1]
        if view(probe).raw != struct.pack("i624I", position, *words):
            return None
    kept, want = view(probe).raw, [probe.random() for _ in range(700)]
    view(probe).raw = kept
    return view(generator) if [probe.random() for _ in range(700)] == want else None


class PythonGenerator(AlwaysReady):
    name = "python_generator"
    why = "random.seed and every draw change the one generator of the process"

    def __init__(self) -> None:
        self.generator: random.Random = random._inst
        self.bytes = python_state_view(self.generator)
        self.extra = vars(self.generator)  # holds gauss_next, the second of a pair of draws

    def save(self) -> tuple[Any, Any]:
        if self.bytes is None:
            return self.generator.getstate(), None
        return self.bytes.raw, self.extra["gauss_next"]

    def load(self, want: tuple[Any, Any], held: tuple[Any, Any]) -> None:
        if self.bytes is None:
            self.generator.setstate(want[0])
        elif want != held:
            self.bytes.raw, self.extra["gauss_next"] = want

    def initial(self, who: RankIdentity) -> tuple[Any, Any]:
        fresh = random.Random(who.seed)
        if self.bytes is None:
            return fresh.getstate(), None
        *words, position = fresh.getstate()[1]
        return struct.pack("i624I", position, *words), None


def numpy_gauss_offset(kind: type) -> int | None:
    """The offset in a RandomState of "has gauss", an int, 8 bytes before the kept number; None if a check fails."""
    probe, mark = kind(1), 0.7071067811865476
    size = kind.__basicsize__

    def raw() -> bytes:
        return ctypes.string_at(id(probe), size)

    _, key, position, *_ = probe.get_state()
    probe.set_state(("MT19937", key, position, 1, mark))
    before, at = raw(), raw().find(struct.pack("d", mark))
    if at < 8 or before[at - 8 : at - 4] != struct.pack("i", 1):
        return None
    probe.set_state(("MT19937", key, position, 0, 0.0))
    if raw()[at - 8 : at - 4] != struct.pack("i", 0):
        return None
    (ctypes.c_char * 16).from_address(id(probe) + at - 8).raw = before[at - 8 : at + 8]
    return at - 8 if probe.get_state()[3:] == (1, mark) else None


class NumpyGenerator:
    """NumPy's, from the program's import of numpy.random on.

    A value is the bit generator, its state, and the kept second of a pair of normal draws.
    """

    name = "numpy_generator"
    why = "numpy.random.seed and every draw change the one generator of the process"

    def __init__(self) -> None:
        self.bits: Any = None

    def ready(self) -> bool:
        if hasattr(sys.modules.get("numpy"), "__version__") and "numpy.random" not in sys.modules:
            importlib.import_module("numpy.random")  # else `np.random` imports it late, and the first draws are lost
        return hasattr(sys.modules.get("numpy.random"), "mtrand")

    def bind(self) -> None:
        numpy: Any = sys.modules["numpy.random"]
        self.numpy, self.state = numpy, numpy.mtrand._rand
        bits = self.state._bit_generator
        self.bits = bits if isinstance(bits, numpy.MT19937) else numpy.MT19937(0)
        self.gauss: Any = None
        self.bytes: Any = None
        at = numpy_gauss_offset(type(self.state)) if sys.implementation.name == "cpython" else None
        if at is not None:
            self.bytes = (ctypes.c_char * _MERSENNE_BYTES).from_address(self.bits.ctypes.state_address)
            self.gauss = (ctypes.c_char * 16).from_address(id(self.state) + at)

    def save(self) -> tuple[Any, Any, Any]:
        bits = self.state._bit_generator
        if bits is self.bits and self.bytes is not None:
            return bits, self.bytes.raw, self.gauss.raw
        return bits, self.state.get_state(legacy=False), None

    def load(self, want: tuple[Any, Any, Any], held: tuple[Any, Any, Any]) -> None:
        if want[0] is not held[0]:
            self.numpy.set_bit_generator(want[0])
        if want[2] is None:
            self.state.set_state(want[1])
        elif want[1] != held[1] or want[2] != held[2] or want[0] is not held[0]:
            self.bytes.raw, self.gauss.raw = want[1], want[2]

    def initial(self, who: RankIdentity) -> tuple[Any, Any, Any]:
        """As after numpy.random.seed(seed), on the bit generator that all ranks share in turn."""
        fresh = self.numpy.RandomState(who.seed % 2**32)
        if self.bytes is None:
            return self.bits, fresh.get_state(legacy=False), None
        address = fresh._bit_generator.ctypes.state_address
        return self.bits, ctypes.string_at(address, _MERSENNE_BYTES), bytes(16)


GENERATORS: tuple[Callable[[], Any], ...] = (TorchGenerator, CudaGenerators, PythonGenerator, NumpyGenerator)
