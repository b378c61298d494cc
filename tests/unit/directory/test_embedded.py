"""The embedded server: real, private, and gone without a trace however its parent ends."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from cluster.directory.embedded import EmbeddedRedis

PARENT = """
import sys, time
from cluster.directory.embedded import EmbeddedRedis
server = EmbeddedRedis()
print(server.pid, server.guardian_pid, server.socket_path, flush=True)
sys.stdin.read()
"""


def wait_until_gone(pids: list[int], path: Path) -> None:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) or path.exists():
        assert time.monotonic() < deadline, f"left behind: {pids} {path}"
        time.sleep(0.02)


def test_it_is_private_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        pids = [server.pid, server.guardian_pid]
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert client.set("key", "value") and client.get("key") == b"value"
            assert client.config_get("port") == {"port": "0"}, "no TCP port"
        assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        assert len(str(server.socket_path)) < 100
    wait_until_gone(pids, server.socket_path.parent)
    server.stop()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_it_dies_with_its_parent(kill: signal.Signals | None) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdin is not None and parent.stdout is not None
    pid, guardian_pid, socket_path = parent.stdout.readline().split()
    assert psutil.pid_exists(int(pid)) and Path(socket_path).is_socket()
    if kill is None:
        parent.stdin.close()  # it ends by itself, without stopping the server
    else:
        parent.send_signal(kill)
    parent.wait(20)
    wait_until_gone([int(pid), int(guardian_pid)], Path(socket_path).parent)
    parent.stdin.close()
    parent.stdout.close()


def test_a_killed_server_is_replaced() -> None:
    with EmbeddedRedis() as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 20
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            while True:
                with contextlib.suppress(redis.RedisError, OSError):
                    if client.info("server")["process_id"] != first:
                        break
                assert time.monotonic() < deadline
                time.sleep(0.02)
        second = server.pid
    wait_until_gone([first, second, server.guardian_pid], server.socket_path.parent)
