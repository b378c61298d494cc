"""A private Ray instance on this machine: started, and ended without a trace.

Invariant: whatever was started carries this runtime's mark in its environment, so `stop` finds and ends all of it, also
when `start` was interrupted half way; no process, socket or file is left. If this process is killed instead, Ray's own
processes follow it, and a small guardian removes their directory. Used by `actors.cluster`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, without stubs

NAMESPACE = "tandem"
_MARK = "_TANDEM_RUNTIME"
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; no tensor or token travels through it
_STOP_LIMIT_S = 20.0

# Waits for the end of its input, which the kernel closes when the parent dies; gives Ray's processes time to die, too.
_GUARDIAN = """
cat >/dev/null
for second in 1 2 3 4 5 6 7 8 9 10; do
    [ -d "$0" ] || exit 0
    sleep 1
done
rm -rf "$0"
"""


class RayRuntime:
    """One Ray instance with a directory and a token of its own. `stop` may be called at any time, any number of
    times."""

    def __init__(self) -> None:
        # Short, because Ray puts Unix sockets deep below it and their paths are limited to about 100 bytes.
        self.dir = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))
        self._guardian = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, str(self.dir)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._token = self.dir / "token"
        self._environment: dict[str, str | None] = {}

    def start(self, *, log_to_driver: bool) -> None:
        """Starts Ray; takes 10 to 60 seconds on a small machine."""
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self._set_environment(
            {
                _MARK: str(self.dir),
                # Ray's own default for the token differs between `ray.init` and `ray start`, so both are told.
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self._token),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_COLOR_PREFIX": "0",
                "RAY_DEDUP_LOGS": "0",
                # A busy machine takes longer than Ray's 15 s to start the agent, and the raylet would abort.
                "RAY_agent_register_timeout_ms": "120000",
            }
        )
        _reread_environment()
        ray.init(
            address="local",  # never join what an earlier run left behind
            namespace=NAMESPACE,
            _temp_dir=str(self.dir / "ray"),
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
        )

    def stop(self) -> None:
        """Ends Ray and everything that it started."""
        with suppress(Exception):  # a half-started Ray may fail to shut down in any way; what it leaves is ended below
            ray.shutdown()
        self._end_processes()
        self._restore_environment()
        shutil.rmtree(self.dir, ignore_errors=True)
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        self._guardian.wait(_STOP_LIMIT_S)

    def processes(self) -> list[psutil.Process]:
        """The living processes of this runtime, this one excepted."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        # Ray renames its processes and some outlive their parents, so neither names nor the process tree can be relied
        # on; the environment is inherited by all.
        if process.pid == os.getpid():
            return False
        try:
            return process.environ().get(_MARK) == str(self.dir) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def _end_processes(self) -> None:
        deadline = time.monotonic() + _STOP_LIMIT_S
        while (processes := self.processes()) and time.monotonic() < deadline:
            _, alive = psutil.wait_procs(processes, timeout=0.2)
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(alive, timeout=1.0)

    def _set_environment(self, values: dict[str, str]) -> None:
        for name, value in values.items():
            self._environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment.clear()
        _reread_environment()


def _reread_environment() -> None:
    # Ray reads its settings and its token once per process, when it is imported; there is no public way to tell it
    # again.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def gpus() -> float:
    """GPUs that Ray found."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)
