"""Settings that hold for every test: no hub, no options from the caller's environment, one thread for tensors."""

import os

for _variable in [name for name in os.environ if name.startswith("TANDEM_")]:
    del os.environ[_variable]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.support.cluster import client, running_cluster  # noqa: E402  # the environment comes first

__all__ = ["client", "running_cluster"]
