import pytest
import torch

from strategies.inputs.variants.adversarial import Values, values_generator


@pytest.mark.parametrize(("partial", "with_parts", "without"), [
    ("also", True, True), ("only", True, False), ("never", False, True),
])  # fmt: skip
def test_values_say_of_which_rules_they_are_asked(partial, with_parts, without):
    kind = Values("x", "why", lambda sample, rng: None, partial=partial)
    assert (kind.asks(True), kind.asks(False)) == (with_parts, without)


def test_random_numbers_depend_on_the_name_and_the_seed_alone():
    first, again, other, later = (torch.rand(3, generator=values_generator(*key)) for key in
                                  (("ties", 1), ("ties", 1), ("zeros", 1), ("ties", 2)))  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, later)
