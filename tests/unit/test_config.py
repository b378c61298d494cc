"""Precedence of the sources, and the sentence that a wrong option gets."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import TandemConfig, load_config, option_names
from cluster.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "tandem.yaml"
    path.write_text("engine: {block_size: 64, max_batch: 7}\ncluster: {workers: 3}\n")
    return path


def refusal(flags: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags)
    return str(caught.value)


def test_flags_win_over_environment_over_file_over_defaults(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ENGINE__BLOCK_SIZE", "32")
    monkeypatch.setenv("TANDEM_ENGINE__MAX_BATCH", "9")
    config = load_config({"config_file": yaml_file, "engine": {"block_size": "8"}})
    assert config.engine.block_size == 8  # the flag
    assert config.engine.max_batch == 9  # the environment
    assert config.cluster.workers == 3  # the file
    assert config.engine.max_queue == TandemConfig().engine.max_queue  # the default


def test_the_file_can_be_named_in_the_environment(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CONFIG_FILE", str(yaml_file))
    assert load_config().cluster.workers == 3


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load_config({"config_file": path}).engine == TandemConfig().engine


def test_a_section_can_come_as_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SPECULATIVE", '{"method": "ngram", "num_speculative_tokens": 5}')
    speculative = load_config().speculative
    assert (speculative.method, speculative.num_speculative_tokens) == ("ngram", 5)


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), (1 << 20, 1 << 20)])
def test_memory_sizes_take_units(text: object, size: int) -> None:
    assert load_config({"engine": {"kv_cache_bytes": text}}).engine.kv_cache_bytes == size


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine": {"block_size": 17}}, ["engine.block_size", "17", "power of two", "TANDEM_ENGINE__BLOCK_SIZE"]),
        ({"engine": {"max_batch": 0}}, ["engine.max_batch", "0", "greater than or equal to 1"]),
        ({"engine": {"kv_cache_bytes": "2 zonks"}}, ["engine.kv_cache_bytes", "2 zonks", "2GiB"]),
        ({"engine": {"blok_size": 16}}, ["engine.blok_size", "did you mean engine.block_size?"]),
        ({"engine": "x"}, ["engine", "mapping"]),
        ({"cluster": {"port": 65536}}, ["cluster.port", "65536", "65535"]),
        ({"speculative": {"method": "eagle9"}}, ["speculative.method", "eagle9", "'eagle3'"]),
        ({"speculative": {"method": "eagle3"}}, ["speculative", "'model'", "folder of the draft"]),
        ({"speculative": {"method": "ngram", "model": "/d"}}, ["speculative", "ngram takes no draft model"]),
        ({"speculative": {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}}, ["prompt_lookup_min"]),
        ({"speculative": {"method": "ngram", "tree_top_k": 2}}, ["ngram drafts chains only", "tree_top_k"]),
        ({"speculative": {"method": "eagle3", "model": "/d", "tree_top_k": 33}}, ["tree_top_k", "33", "32"]),
        ({"nonsense": 1}, ["nonsense is no option"]),
    ],
)
def test_a_wrong_option_gets_one_sentence(flags: dict[str, Any], words: list[str]) -> None:
    message = refusal(flags)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert message.endswith(".")


def test_several_mistakes_are_counted() -> None:
    assert "1 more wrong after this one" in refusal({"engine": {"max_batch": 0, "chunk": 0}})


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ENGINE__BLOK_SIZE", "16")
    assert "did you mean TANDEM_ENGINE__BLOCK_SIZE?" in refusal({})


def test_a_variable_with_broken_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ENGINE", "{block")
    assert "engine" in refusal({})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("engine: {block_size: 64\ncluster: 3", "isn't valid YAML (line 2)"),
        ("- a\n", "mapping"),
        ("foo: 1", "foo is no option"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text(content)
    assert words in refusal({"config_file": path})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "can't be read (No such file" in refusal({"config_file": tmp_path / "absent.yaml"})


def test_a_password_is_never_shown() -> None:
    config = load_config({"cluster": {"redis_url": "redis://user:hunter2@127.0.0.1:6380/0"}})
    assert "hunter2" not in f"{config!r} {config} {config.model_dump_json()}"
    assert "hunter2" not in refusal({"cluster": {"redis_url": ["hunter2"]}})


def test_api_keys_come_as_digests_by_tenant_and_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CLUSTER__API_KEYS", f'{{"red": "{"ab" * 32}"}}')
    monkeypatch.setenv("TANDEM_CLUSTER__TENANT_SECRET", "correct horse battery")
    monkeypatch.setenv("TANDEM_API_KEY", "a client's, which the cluster has no use for")
    config = load_config()
    assert config.cluster.api_keys == {"red": "ab" * 32}
    assert config.cluster.tenant_secret and config.cluster.tenant_secret.get_secret_value() == "correct horse battery"
    assert "abab" not in f"{config!r} {config}" and "battery" not in f"{config!r} {config} {config.model_dump_json()}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_keys": {"red": "hunter2"}}, ["cluster.api_keys.red", "64 hex", "(by flag, TANDEM_CLUSTER__API_KEYS or"]),
        ({"api_keys": {"red": "HUNTER2"}}, ["cluster.api_keys.red", "SHA-256"]),
        ({"api_keys": {"": "ab" * 32}}, ["cluster.api_keys", "at least 1 character"]),
        ({"api_keys": ["hunter2"]}, ["cluster.api_keys"]),
        ({"tenant_secret": "hunter2"}, ["cluster.tenant_secret", "16"]),
    ],
)
def test_a_wrong_secret_is_refused_without_repeating_it(options: dict[str, Any], words: list[str]) -> None:
    message = refusal({"cluster": options})
    assert all(word in message for word in words), message
    assert "hunter2" not in message.lower()


def test_the_engine_gets_what_was_set() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    speculative |= {"allow_pickle": True}
    engine = {"chunk": None, "max_model_len": 512, "reuse": False, "kv_cache_bytes": "1MiB", "draft_block_size": 8}
    made = load_config({"model": "/m", "speculative": speculative, "engine": engine}).to_engine_config()
    assert (made.model, made.draft, made.method, made.num_speculative_tokens) == (Path("/m"), None, "ngram", 4)
    assert (made.ngram_min, made.ngram_max, made.allow_pickle, made.chunk, made.max_len) == (2, 3, True, None, 512)
    assert (made.enable_reuse, made.kv_bytes, made.draft_block_size) == (False, 1 << 20, 8)


def test_the_engine_gets_the_width_of_trees() -> None:
    speculative = {"method": "eagle3", "model": "/d", "tree_top_k": 4, "tree_total_tokens": 16}
    made = load_config({"model": "/m", "speculative": speculative}).to_engine_config()
    assert (made.tree_top_k, made.tree_total_tokens) == (4, 16)


def test_the_docs_list_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    missing = [name for name in option_names() if f"`{name}`" not in text]
    assert not missing
