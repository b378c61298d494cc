"""Settings that hold for every test: no hub, no options from the caller's environment, one thread, Ctrl-C as usual."""

import os
import signal

for _variable in [name for name in os.environ if name.startswith("TANDEM_")]:
    del os.environ[_variable]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell that runs the tests in the background has them ignore SIGINT, and so would all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.support.cluster import client, running_cluster  # noqa: E402  # the environment comes first

__all__ = ["client", "running_cluster"]
