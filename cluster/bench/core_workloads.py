"""The workloads of `tandem bench core` on Tandem's own caches: one thread, CPU time, no tensors.

Each is a closure-free function that returns seconds or bytes, so that peers' scripts can mirror it step by step.
Called by `core.py`."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from cluster.core.handle import Coupling
from cluster.core.paired_cache import PairedCache, PoolSpec

PROMPT_TOKENS = 32_768
BLOCK_SIZE = 16
VOCABULARY = 50_000
_REPEATS = 5


def paired_cache(blocks: int) -> PairedCache:
    """A target pool and a hidden-state draft pool of span 1."""
    return PairedCache(
        PoolSpec("target", BLOCK_SIZE, blocks), PoolSpec("draft", BLOCK_SIZE, blocks, span=1), Coupling.JOINT
    )


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def serve(cache: PairedCache, prompt: list[int], hash_keys: bool = False) -> None:
    """A request from arrival to end in both pools: claim, reserve what is missing, one token, commit, free.

    A claim needs no hashes. `hash_keys` makes the prompt's keys first all the same, as the gateway does for the
    cluster."""
    handle = cache.open("request", prompt)
    if hash_keys:
        stream = handle.holdings["target"].stream
        stream.block_keys(0, stream.n_units // BLOCK_SIZE)
    cache.claim(handle)
    rest = len(prompt) - handle.cursor("target")
    if cache.reserve(handle, rest, rest) is None:
        raise RuntimeError("the pool of this measurement is too small")
    cache.append(handle, (1,))
    cache.commit(handle, rest, rest)
    cache.free(handle)


def claim_cycle(rounds: int) -> dict[str, float]:
    """Seconds for a prompt's full-hit cycle in both pools, with its keys hashed and without; and for the lookup
    alone."""
    cache, prompt = paired_cache(3 * PROMPT_TOKENS // BLOCK_SIZE), prompt_of(random.Random(1), PROMPT_TOKENS)
    serve(cache, prompt)
    lookups = iter([cache.open("lookup", prompt) for _ in range(rounds)])
    return {
        "hashed": _best(lambda: serve(cache, prompt, hash_keys=True), rounds),
        "unhashed": _best(lambda: serve(cache, prompt), rounds),
        "lookup": _best(lambda: cache.probe(next(lookups)), rounds),
    }


def turn(rounds: int) -> float:
    """Seconds to serve a known prompt that is 256 tokens longer than last time: only these are hashed."""
    cache, rng = paired_cache(2 * (PROMPT_TOKENS + 256 * rounds) // BLOCK_SIZE), random.Random(2)
    prompts = [prompt_of(rng, PROMPT_TOKENS)]
    for _ in range(rounds):
        prompts.append(prompts[-1] + prompt_of(rng, 256))
    serve(cache, prompts[0])
    return min(_seconds(partial(serve, cache, prompt)) for prompt in prompts[1:])


def evict_cycle(rounds: int) -> float:
    """Seconds to serve an unknown prompt where every block must be evicted first, both pools, publishing included."""
    cache, rng = paired_cache(PROMPT_TOKENS // BLOCK_SIZE + 8), random.Random(3)
    serve(cache, prompt_of(rng, PROMPT_TOKENS))
    return min(_seconds(partial(serve, cache, prompt_of(rng, PROMPT_TOKENS))) for _ in range(rounds))


def decode_step(steps: int, running: int = 1, cached: int = 0) -> float:
    """Seconds for one request's decode step (append, reserve, commit) in both pools, with so many running in turns, and
    so many blocks cached beside."""
    cache, rng = paired_cache(running * (_REPEATS * steps // BLOCK_SIZE + 80) + cached + 64), random.Random(4)
    while cache.meters()["target"].cached < cached:
        serve(cache, prompt_of(rng, 64 * BLOCK_SIZE))
    handles = []
    for index in range(running):
        handle = cache.open(str(index), prompt_of(rng, 1024))
        cache.claim(handle)
        cache.reserve(handle, 1024, 1024)
        cache.append(handle, (1,))
        cache.commit(handle, 1024, 1024)
        handles.append(handle)

    def run() -> None:
        for _ in range(steps):
            for handle in handles:
                cache.append(handle, (7,))
                cache.reserve(handle, 1, 3)
                cache.commit(handle, 1, 1)

    return _best(run, _REPEATS) / (steps * running)


def bytes_per_block(prompts: int = 64, tokens: int = 4096) -> float:
    """Bytes that a cached block costs in both trees together, reports' bookkeeping included."""
    cache, rng = paired_cache(prompts * (tokens // BLOCK_SIZE + 2)), random.Random(5)
    texts = [prompt_of(rng, tokens) for _ in range(prompts)]
    cache.changes()
    gc.collect()
    tracemalloc.start()
    for text in texts:
        serve(cache, text)
        cache.changes()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / cache.meters()["target"].cached


def _best(run: Callable[[], object], rounds: int) -> float:
    return min(_seconds(run) for _ in range(rounds))


def _seconds(run: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        run()
        return time.process_time() - started
    finally:
        gc.enable()
