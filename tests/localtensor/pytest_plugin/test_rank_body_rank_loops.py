import asyncio

from localtensor.pytest_plugin.rank_body import RankEventLoop


async def loop_and(value):
    return asyncio.get_running_loop(), value


def test_all_that_a_rank_awaits_runs_on_one_loop():
    loop = RankEventLoop()
    first, second = loop.run(loop_and(1)), loop.run(loop_and(2))
    assert first[0] is second[0] and (first[1], second[1]) == (1, 2)
    loop.close()
    assert first[0].is_closed()


def test_tasks_that_are_left_are_cancelled():
    async def leave():
        return asyncio.create_task(asyncio.sleep(5))

    loop = RankEventLoop()
    left = loop.run(leave())
    loop.close()
    assert left.cancelled()


def test_a_loop_that_nobody_used_is_none():
    loop = RankEventLoop()
    loop.close()
    assert loop._loop is None
