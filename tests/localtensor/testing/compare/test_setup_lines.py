import torch
from torch import Tensor, nn

from localtensor.testing.compare import setup_lines


class Wrapper(Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, shape):
        return Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def test_a_tensor_without_memory_is_known_by_itself():
    wrapper, plain = Wrapper((2,)), torch.ones(2)
    assert setup_lines._identities(wrapper) == [id(wrapper)]
    assert setup_lines._identities(plain)[1:] == setup_lines._identities(plain.detach())[1:] != []


def test_a_module_is_known_by_itself():
    module = nn.Identity()
    assert setup_lines._identities(module) == [id(module)]
