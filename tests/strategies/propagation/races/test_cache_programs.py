"""What the programs over the cache hold it to."""

import pytest

from localtensor.concurrency.sync import THREAD_SYNC
from strategies.propagation.races.cache_programs import CacheUnderTest, YieldingKey, require


def test_who_asks_after_a_clear_must_not_be_told_by_the_old_rule():
    world = CacheUnderTest(THREAD_SYNC)
    assert world.get("k") == ("k", 0)
    world.rule = world.settled = 1  # a change whose clear did nothing
    with pytest.raises(AssertionError, match="asked after the clear for rule 1, answered by rule 0"):
        world.get("k")


def test_a_change_clears_and_is_settled_then():
    world = CacheUnderTest(THREAD_SYNC)
    world.get("k")
    world.change()
    assert world.settled == 1 and world.get("k") == ("k", 1)


def test_what_is_computed_twice_or_not_kept_is_seen():
    world = CacheUnderTest(THREAD_SYNC)
    world.get("k")
    world.check_once_each()
    world.check_kept("k")
    world.cache.clear()
    with pytest.raises(AssertionError, match="what was computed is not kept"):
        world.check_kept("k")
    with pytest.raises(AssertionError, match="computed twice"):
        world.check_once_each()


def test_the_value_of_another_key_is_seen():
    world = CacheUnderTest(THREAD_SYNC)
    world.cache.get(world.key("b"), lambda: ("a", 0))
    with pytest.raises(AssertionError, match="asked for b, got a"):
        world.get("b")


def test_keys_collide_and_differ():
    one, two = YieldingKey(THREAD_SYNC, "a"), YieldingKey(THREAD_SYNC, "b")
    assert hash(one) == hash(two) and one != two and one == YieldingKey(THREAD_SYNC, "a")


def test_hold_raises_the_words():
    require(True, "never said")
    with pytest.raises(AssertionError, match="said"):
        require(False, "said")
