"""The README's commands on the tiny model, end to end, as a user starts them: real Ray, real Redis, real gRPC."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli_process import EAGLE3, MODELS, ROOT, TandemProcess, eventually, users_environment

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
TARGET = str(MODELS / "tiny-target")
KEYS = [
    "worker",
    "prompt_tokens",
    "reused_target",
    "reused_draft",
    "reused_joint",
    "acceptance",
    "ttft_s",
    "tokens_per_s",
    "text",
]


def play(path: Path, *arguments: str) -> list[dict[str, object]]:
    """What `tandem demo` writes; it exits with 0 and leaves no process."""
    demo = TandemProcess("demo", "--model", TARGET, "--json", str(path), *arguments)
    try:
        assert demo.end(limit_s=300) == 0, demo.output
        assert eventually(lambda: not demo.family())
    finally:
        demo.kill()
    requests = json.loads(path.read_text())["requests"]
    assert all(list(request) == KEYS for request in requests)
    assert all(str(request["worker"]) in demo.output for request in requests)
    return requests


def test_the_demo_reuses_both_pools_and_speculation_changes_no_text(tmp_path: Path) -> None:
    first, second, third = play(tmp_path / "on.json", "--speculative-config", EAGLE3)
    plain = play(tmp_path / "off.json", "--no-speculation")
    assert [first["text"], second["text"], third["text"]] == [request["text"] for request in plain]
    assert first["reused_joint"] == 0
    for request in (second, third):
        assert request["reused_target"] > 0 and request["reused_draft"] > 0 and request["reused_joint"] > 0
    assert second["reused_joint"] > third["reused_joint"]  # a conversation shares more than a system prompt
    assert second["worker"] == first["worker"]
    assert all(request["reused_draft"] == 0 and request["acceptance"] is None for request in plain)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TandemProcess, str]]:
    """`tandem serve`, ready, and where it listens."""
    serve = TandemProcess("serve", TARGET, "--speculative-config", EAGLE3, "--port", "0", "--kv-cache-bytes", "16MiB")
    try:
        text = serve.wait_for("grpc://", 300)
        serve.wait_for("╯")
        yield serve, text.split("grpc://")[1].split()[0]
    finally:
        serve.kill()


def tandem(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=users_environment(), input=stdin, capture_output=True, text=True, timeout=120
    )


def test_the_box_tells_what_is_served(served: tuple[TandemProcess, str]) -> None:
    text = served[0].output
    for words in ("tiny-target", "eagle3", "target pool", "draft pool", "MiB per worker", "1 token: where two prompts"):
        assert words in text


def test_generate_streams_the_answer_to_stdout_and_figures_to_stderr(served: tuple[TandemProcess, str]) -> None:
    question = ["generate", "count from 3 to 7", "--temperature", "0", "--max-tokens", "12", "--endpoint", served[1]]
    first, again = tandem(*question), tandem(*question)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() and first.stdout == again.stdout
    assert "reused" in first.stderr and "reused" not in first.stdout


def test_generate_reads_stdin_and_can_leave_the_template_out(served: tuple[TandemProcess, str]) -> None:
    result = tandem("generate", "-", "--raw", "--max-tokens", "4", "--endpoint", served[1], stdin="one two three")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--max-tokens", "0"], "max_tokens"),
        (["", "--raw"], "prompt"),
    ],
)
def test_a_bad_request_is_one_sentence(served: tuple[TandemProcess, str], arguments: list[str], words: str) -> None:
    result = tandem("generate", *arguments, "--endpoint", served[1])
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


def test_the_example_of_the_quickstart_runs(served: tuple[TandemProcess, str]) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("127.0.0.1:50051", served[1])
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_chat_keeps_the_conversation(served: tuple[TandemProcess, str]) -> None:
    lines = "count from 1 to 5\n/nonsense\n/help\ncount from 2 to 6\n/clear\n/exit\n"
    arguments = ["--temperature", "0", "--max-tokens", "12", "--endpoint", served[1]]
    result = tandem("chat", *arguments, stdin=lines)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens, reused") == 2
    assert "/nonsense is no command" in result.stdout and "/clear" in result.stdout


def test_status_shows_the_worker(served: tuple[TandemProcess, str]) -> None:
    result = tandem("status", "--endpoint", served[1])
    assert result.returncode == 0, result.stderr
    assert "worker-0" in result.stdout and "ready" in result.stdout


def test_sigterm_leaves_no_process_and_no_socket(served: tuple[TandemProcess, str]) -> None:
    serve, _ = served
    folders = serve.folders()
    assert folders
    assert serve.end(signal.SIGTERM) == 143, serve.output
    assert eventually(lambda: not serve.family())
    assert not [folder for folder in folders if folder.exists()]


def test_a_cluster_with_keys_serves_who_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"key-red").hexdigest()
    monkeypatch.setenv("TANDEM_CLUSTER__API_KEYS", json.dumps({"red": digest}))
    serve = TandemProcess("serve", TARGET, "--port", "0", "--kv-cache-bytes", "16MiB", "--log-level", "debug")
    try:
        endpoint = serve.wait_for("grpc://", 300).split("grpc://")[1].split()[0]
        ask = ["generate", "hi", "--max-tokens", "4", "--endpoint", endpoint]
        refused, wrong = tandem(*ask), tandem(*ask, "--api-key", "key-blue")
        assert refused.returncode == wrong.returncode == 2
        assert "send your API key" in refused.stderr and "isn't known" in wrong.stderr
        monkeypatch.setenv("TANDEM_API_KEY", "key-red")
        for arguments in (ask, ["status", "--endpoint", endpoint]):
            result = tandem(*arguments)
            assert result.returncode == 0, result.stderr
            assert result.stdout.strip()
        serve.end(signal.SIGTERM)
        assert digest not in serve.output and "key-red" not in serve.output
    finally:
        serve.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_signal_during_start_up_leaves_no_process_and_no_socket(number: signal.Signals, code: int) -> None:
    serve = TandemProcess("serve", TARGET, "--port", "0")
    try:
        serve.wait_for("✓ Starting Redis")
        assert eventually(lambda: len(serve.family()) > 2)  # Ray's processes are coming up
        folders = serve.folders()
        assert serve.end(number) == code, serve.output
        assert eventually(lambda: not serve.family())
        assert not [folder for folder in folders if folder.exists()]
        assert "Traceback" not in serve.output
    finally:
        serve.kill()


def test_a_draft_with_another_vocabulary_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(MODELS / "tiny-draft", draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    speculative = json.dumps({"method": "draft_model", "model": str(draft)})
    serve = TandemProcess("serve", TARGET, "--speculative-config", speculative, "--port", "0")
    try:
        assert serve.end() == 3, serve.output
        error = serve.output.rpartition("error: ")[2]
        assert "The draft's vocabulary is not the target's" in error
        assert error.count("\n") == 1 and "Traceback" not in serve.output
        assert eventually(lambda: not serve.family())
    finally:
        serve.kill()


def test_a_folder_without_safetensors_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODELS / "tiny-target" / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    result = tandem("serve", str(tmp_path), "--port", "0")
    assert result.returncode == 3
    assert "safetensors" in result.stderr and "Starting" not in result.stdout
