"""Dynamo's RadixTree on the lookups of `tandem bench router`. Runs in Dynamo's environment; prints one line of JSON.

python dynamo_router.py BLOCKS WORKERS TYPICAL_HOLDERS ROUNDS
"""

# Types aren't checked: this runs where the peer is installed, and Tandem isn't.
# mypy: ignore-errors

import json
import random
import sys
import time

from dynamo._core import RadixTree


def stored(number, hashes):
    blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
    return json.dumps({"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}).encode()


def find_us(hashes, workers, holders, rounds):
    tree = RadixTree()
    for holder in range(holders):
        depth = (holder + 1) * len(hashes) // holders
        tree.apply_event(holder * workers // holders, stored(1, hashes[:depth]))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        scores = tree.find_matches(hashes).scores
        times.append(time.perf_counter() - started)
        if len(scores) != holders:
            raise RuntimeError(f"{len(scores)} workers were found, but {holders} hold the prompt")
    return 1e6 * sorted(times)[rounds // 2]


def main():
    blocks, workers, typical, rounds = map(int, sys.argv[1:])
    rng = random.Random(1)
    hashes = [rng.getrandbits(63) for _ in range(blocks)]
    print(
        json.dumps(
            {
                "typ_p50_us": find_us(hashes, workers, typical, rounds),
                "hot_p50_us": find_us(hashes, workers, workers, rounds),
            }
        )
    )


if __name__ == "__main__":
    main()
