"""SGLang's radix cache on the lookup of `tandem bench core`. Runs in SGLang's environment; prints one line of JSON.

    python sglang_core.py PROMPT_TOKENS BLOCK_SIZE

Of all that SGLang imports, the radix cache needs torch only: modules that aren't installed are replaced by empty ones.
"""

# Types aren't checked: this runs where the peer is installed, and Tandem isn't.
# mypy: ignore-errors

import gc
import json
import random
import sys
import time
from array import array
from importlib.util import find_spec
from types import ModuleType

ROUNDS = 15
UNUSED = (
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.platforms",
)


class Names(type):
    """A class that has every name as an attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (Anything,), {})


class Anything(metaclass=Names):
    """Stands for whatever isn't there: a class to inherit from, a function to call, a condition that is false."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        return self

    def __bool__(self):
        return False


class AbsentModule(ModuleType):
    """Any name can be imported from it."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (Anything,), {})


def import_radix_cache():
    """SGLang's module, whatever of its surroundings is missing. Its top package, which imports servers, and its kernels
    are left unloaded."""
    package = ModuleType("sglang")
    package.__path__ = list(find_spec("sglang").submodule_search_locations)
    sys.modules["sglang"] = package
    for name in UNUSED:
        sys.modules[name] = AbsentModule(name)
    while True:
        try:
            from sglang.srt.mem_cache import base_prefix_cache, radix_cache

            return radix_cache, base_prefix_cache
        except ModuleNotFoundError as error:
            if error.name is None or error.name in sys.modules:
                raise
            sys.modules[error.name] = AbsentModule(error.name)


def seconds(run):
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        run()
        return time.process_time() - started
    finally:
        gc.enable()


def main():
    import torch

    tokens, page_size = int(sys.argv[1]), int(sys.argv[2])
    radix, base = import_radix_cache()
    rng = random.Random(1)
    prompt = array("q", [rng.randrange(50_000) for _ in range(tokens)])
    cache = radix.RadixCache.create_simulated(page_size=page_size)
    key = radix.RadixKey(prompt)
    cache.insert(base.InsertParams(key=key, value=torch.arange(tokens)))
    found = cache.match_prefix(base.MatchPrefixParams(key=key)).device_prefix_len
    if found != tokens:
        raise RuntimeError(f"{found} of {tokens} tokens found")
    lookup = min(seconds(lambda: cache.match_prefix(base.MatchPrefixParams(key=key))) for _ in range(ROUNDS))
    print(json.dumps({"claim.ms": 1e3 * lookup}))


if __name__ == "__main__":
    main()
