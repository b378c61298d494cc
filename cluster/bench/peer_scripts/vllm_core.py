"""vLLM's KVCacheManager on the workloads of `tandem bench core`. Runs in vLLM's environment; prints one line of JSON.

python vllm_core.py PROMPT_TOKENS BLOCK_SIZE
"""

# Types aren't checked: this runs where the peer is installed, and Tandem isn't.
# mypy: ignore-errors

import gc
import json
import os
import random
import sys
import time

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

ROUNDS = 15


def make_manager(blocks, block_size):
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=1 << 20, scheduler_block_size=block_size, hash_block_size=block_size)


def make_request(name, prompt, hasher):
    params = SamplingParams(max_tokens=1 << 16)
    params.update_from_generation_config({}, 2)
    return Request(name, list(prompt), params, None, block_hasher=hasher)


def seconds(run):
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        run()
        return time.process_time() - started
    finally:
        gc.enable()


def serve(manager, prompt, hasher):
    manager.new_step_starts()
    request = make_request("request", prompt, hasher)
    blocks, computed, *_ = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, len(prompt) - computed, computed, blocks) is None:
        raise RuntimeError("the pool of this measurement is too small")
    request.num_computed_tokens = len(prompt)
    manager.free(request)


def decode_step(manager, prompt, hasher, steps):
    request = make_request("decode", prompt, hasher)
    blocks, computed, *_ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, len(prompt) - computed, computed, blocks)
    request.num_computed_tokens = len(prompt)

    def run():
        for _ in range(steps):
            request.append_output_token_ids(7)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1

    return seconds(run) / steps


def main():
    tokens, block_size = int(sys.argv[1]), int(sys.argv[2])
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    rng = random.Random(1)

    def prompt(count=tokens):
        return [rng.randrange(50_000) for _ in range(count)]

    roomy = make_manager(3 * tokens // block_size, block_size)
    known = prompt()
    serve(roomy, known, hasher)
    cycle = min(seconds(lambda: serve(roomy, known, hasher)) for _ in range(ROUNDS))
    tight = make_manager(tokens // block_size + 8, block_size)
    serve(tight, prompt(), hasher)
    news = [prompt() for _ in range(ROUNDS)]
    evict = min(seconds(lambda new=new: serve(tight, new, hasher)) for new in news)
    decode = decode_step(make_manager(1000, block_size), prompt(1024), hasher, 4000)
    print(json.dumps({"claim_cycle.ms": 1e3 * cycle, "evict.ms": 1e3 * evict, "decode_step.us": 1e6 * decode}))


if __name__ == "__main__":
    main()
