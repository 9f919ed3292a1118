from types import SimpleNamespace

import pytest

from localtensor._util.patching import replaced, wrapped


class Base:
    def twice(self, x):
        return 2 * x


class Derived(Base):
    pass


def test_an_inherited_attribute_is_inherited_again_afterwards():
    with replaced(Derived, "twice", lambda self, x: "other"):
        assert Derived().twice(3) == "other" and Base().twice(3) == 6
    assert "twice" not in vars(Derived) and Derived().twice(3) == 6


def test_it_comes_back_when_the_block_raises():
    box = SimpleNamespace(x=1)
    with pytest.raises(KeyError), replaced(box, "x", 2):
        raise KeyError
    assert box.x == 1


def test_what_is_wrapped_gets_the_original_and_all_arguments():
    with wrapped(Base, "twice", lambda original, self, x: original(self, x) + 1):
        assert Base().twice(3) == 7
        assert Base.twice.__name__ == "twice"
    assert Base().twice(3) == 6
