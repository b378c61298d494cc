"""Settings that hold for every test: no hub, no options from the caller's environment, one thread, Ctrl-C as usual."""

import os
import signal

for _variable in [name for name in os.environ if name.startswith("TANDEM_")]:
    del os.environ[_variable]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Run in the background or under nohup, the tests would ignore SIGINT or SIGHUP, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

from tests.support.cluster import client, running_cluster  # noqa: E402  # the environment comes first

__all__ = ["client", "running_cluster"]
