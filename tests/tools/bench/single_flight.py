"""What a lookup in the shared cache costs, beside its peers: `python -m tests.tools.bench.single_flight`.

Peers: `functools.lru_cache` (in C), the dictionary behind a lock that cachetools recommends for threads, and torch's own
`LocalLRUCache`, which keeps one cache per thread.  Each figure is the best of many short runs.
"""

import functools
import itertools
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.tensor._sharding_prop import LocalLRUCache

from localtensor.concurrency.single_flight import SingleFlightCache
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from localtensor.threads.state.propagation_settings import ambient_settings
from strategies.model.rule import Leaf
from strategies.propagation.cache import CallKeyFactory

CALLS = 1000


class Locked:
    """A dictionary behind a lock."""

    def __init__(self, compute):
        self._compute, self._lock, self._kept = compute, threading.Lock(), {}

    def get(self, key):
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._compute(key)
            return self._kept[key]


def nanoseconds(function, argument, runs=200):
    """Of one call, with an argument that is equal each time."""
    timer = timeit.Timer("function(argument)", globals={"function": function, "argument": argument})
    return min(timer.repeat(runs, CALLS)) / CALLS * 1e9


def with_threads(function, argument, threads, calls=400_000, runs=5):
    """Nanoseconds of processor time for one call, all threads together: what other programs take is not in it."""
    start = threading.Barrier(threads)

    def work():
        function(argument)
        start.wait()
        begun = time.thread_time()
        for _ in itertools.repeat(None, calls // threads):
            function(argument)
        return time.thread_time() - begun

    with ThreadPoolExecutor(threads) as pool:
        return min(sum(pool.map(lambda _: work(), range(threads))) for _ in range(runs)) / calls * 1e9


def main():
    spec = Spec(Mesh.of(dp=2, tp=4), (parse("S(0)"), parse("R")), (8, 4), torch.float32)
    keys = CallKeyFactory()
    calls = [(Leaf(0), Leaf(1)), (Leaf(0), [1], True)]
    for op, specs, args in zip(("aten.mm.default", "aten.sum.dim_IntList"), ([spec] * 2, [spec]), calls, strict=True):
        made = nanoseconds(lambda _, op=op, specs=specs, args=args: keys.of(op, specs, args, {}), None)
        print(f"a key of {op:<24} {made:6.0f} ns")
    print(f"ambient settings                  {nanoseconds(lambda _: ambient_settings(), None):6.0f} ns")
    key = keys.of("aten.mm.default", [spec, spec], calls[0], {})
    peers = {
        "SingleFlightCache": SingleFlightCache(str, name="bench").get,
        "functools.lru_cache": functools.lru_cache(None)(str),
        "lock and dict": Locked(str).get,
        "LocalLRUCache of torch": LocalLRUCache(str),
    }
    for name, get in peers.items():
        get(key)
        hits = " ".join(f"{with_threads(get, key, threads):6.0f}" for threads in (1, 8))
        print(f"{name:<24} a hit {nanoseconds(get, key):6.0f} ns; with 1 and 8 threads {hits} ns")
    fresh = itertools.count()
    cache, lru = SingleFlightCache(float, name="misses", limit=100_000), functools.lru_cache(100_000)(float)
    for name, get in (("SingleFlightCache", cache.get), ("functools.lru_cache", lru)):
        print(f"{name:<24} a miss {nanoseconds(lambda _, get=get: get(next(fresh)), None, runs=50):6.0f} ns")


if __name__ == "__main__":
    main()
