"""Ray Serve's PrefixTree on the lookups of `tandem bench router`; prints one line of JSON.

Only the tree's own module is loaded: its package would bring Ray Serve, of which the tree uses the logger's name.

python ray_router.py CHARACTERS WORKERS TYPICAL_HOLDERS ROUNDS
"""

# Types aren't checked: Ray's module isn't public.
# mypy: ignore-errors

import importlib.util
import json
import random
import string
import sys
import time
import types
from pathlib import Path

_MODULE = "llm/_internal/serve/routing_policies/prefix_aware/prefix_tree.py"


def prefix_tree():
    constants = types.ModuleType("ray.serve._private.constants")
    constants.SERVE_LOGGER_NAME = "ray.serve"
    sys.modules[constants.__name__] = constants
    for package in ("ray.serve", "ray.serve._private"):
        sys.modules[package] = types.ModuleType(package)
    folder = Path(importlib.util.find_spec("ray").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("prefix_tree", folder / _MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PrefixTree()


def match_us(text, workers, holders, rounds):
    tree = prefix_tree()
    names = [f"worker-{number}" for number in range(workers)]
    tree.add_tenants(names, 0.0)
    for holder in range(holders):
        depth = (holder + 1) * len(text) // holders
        tree.insert(text[:depth], names[holder * workers // holders], float(holder + 1))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        matched, _ = tree.prefix_match(text, names)
        times.append(time.perf_counter() - started)
        if matched != text:
            raise RuntimeError(f"{len(matched)} characters were found of {len(text)}")
    return 1e6 * sorted(times)[rounds // 2]


def main():
    characters, workers, typical, rounds = map(int, sys.argv[1:])
    rng = random.Random(1)
    text = "".join(rng.choices(string.ascii_lowercase, k=characters))
    print(
        json.dumps(
            {
                "typ_p50_us": match_us(text, workers, typical, rounds),
                "hot_p50_us": match_us(text, workers, workers, rounds),
            }
        )
    )


if __name__ == "__main__":
    main()
