"""The configuration of a whole cluster, from flags, environment, a YAML file and defaults, in that order of precedence.

Owns every name, default and limit that a user can set. Invariant: a `TandemConfig` is complete and checked, and never
changes. Loaded by the CLI, read by `actors` (which give each worker its `EngineConfig`). docs/configuration.md
describes each option; a test keeps the two in step.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from cluster.config_errors import nearest, sentence
from cluster.core.draft_gap import DraftGap
from cluster.errors import ConfigError, show
from cluster.speculation.lookahead import DraftFolder, SpeculationMethod, draft_folder, drafts_trees

if TYPE_CHECKING:
    from cluster.engine.config import EngineConfig

ENV_PREFIX = "TANDEM_"
_NESTING = "__"
_SECTION = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _is_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("a power of two")
    return value


def _is_digest(value: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError("64 hexadecimal digits in lower case, the SHA-256 of the tenant's API key")
    return value


BlockSize = Annotated[int, Field(ge=1, le=1024), AfterValidator(_is_power_of_two)]
TenantName = Annotated[str, Field(min_length=1, max_length=128)]
KeyDigest = Annotated[str, AfterValidator(_is_digest)]


class SpeculativeConfig(BaseModel):
    """How tokens are drafted; the keys are those of vLLM's `--speculative-config`."""

    model_config = _SECTION

    method: SpeculationMethod = SpeculationMethod.NONE
    """Where drafts come from."""
    model: Path | None = None
    """Folder of the draft (safetensors), for the methods that need one."""
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted in each step."""
    adaptive_length: bool = False
    """Draft fewer tokens, down to none, where recent acceptance and measured times don't pay for more."""
    draft_gap: DraftGap = DraftGap.CLIP
    """What a request does where the draft's pool holds less of its prompt than the target's: clip, skip or auto."""
    prompt_lookup_min: int = Field(default=1, ge=1, le=16)
    """ngram: shortest suffix that is looked up."""
    prompt_lookup_max: int = Field(default=4, ge=1, le=16)
    """ngram: longest suffix that is looked up."""
    suffix_decoding_max_tree_depth: int = Field(default=24, ge=2, le=256)
    """suffix: tokens that are compared at most, plus one."""
    suffix_decoding_max_cached_requests: int = Field(default=10_000, ge=0, le=1_000_000)
    """suffix: outputs of past requests that are remembered; 0 looks into the request's own text only."""
    suffix_decoding_max_spec_factor: float = Field(default=1.0, gt=0, le=16)
    """suffix: tokens drafted at most for each token that matched."""
    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0, le=1)
    """suffix: least probability of a draft, by how often it followed before."""
    tree_top_k: int = Field(default=1, ge=1, le=32)
    """Width of trees of drafts, num_speculative_tokens deep; 1 drafts chains."""
    tree_total_tokens: int = Field(default=60, ge=1, le=256)
    """Tokens of a tree of drafts that are verified, the best ones."""
    allow_pickle: bool = False
    """Read a draft's pickled weights (*.bin) where it has no safetensors; tensors only, no code."""

    @model_validator(mode="after")
    def _agree(self) -> "SpeculativeConfig":
        folder = draft_folder(self.method)
        if folder is DraftFolder.REQUIRED and self.model is None:
            raise ValueError(f"method {self.method} needs 'model', the folder of the draft")
        if folder is DraftFolder.NEVER and self.model is not None:
            raise ValueError(f"method {self.method} takes no draft model; leave 'model' out")
        if self.tree_top_k > 1 and not drafts_trees(self.method):
            raise ValueError(f"method {self.method} drafts chains only; leave tree_top_k at 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must be at most prompt_lookup_max")
        return self


class EngineSection(BaseModel):
    """What each worker's engine may use."""

    model_config = _SECTION

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV; auto is float32 on a CPU and the model's own type on a GPU."""
    block_size: BlockSize = 16
    """Tokens in one block of the target's KV pool (a power of two)."""
    draft_block_size: BlockSize | None = None
    """Tokens in one block of the draft's KV pool; unset means block_size."""
    kv_cache_bytes: ByteSize = Field(default=ByteSize(512 * 2**20), ge=2**16)
    """Memory for both KV pools of a worker together, such as 2GiB."""
    max_batch: int = Field(default=32, ge=1, le=4096)
    """Requests that run in one step."""
    max_queue: int = Field(default=256, ge=1, le=1_000_000)
    """Requests that may wait in one worker before it refuses more."""
    token_budget: int = Field(default=2048, ge=16, le=1_048_576)
    """Tokens that one step may compute."""
    chunk: int | None = Field(default=512, ge=1, le=1_048_576)
    """Longest piece of a prompt computed in one step; none leaves it to token_budget."""
    max_model_len: int | None = Field(default=None, ge=2, le=16_777_216)
    """Longest prompt plus output; unset means what the model was made for."""
    reuse: bool = True
    """Reuse the KV of prompts seen before."""
    audit: bool = False
    """Check the pools' invariants after every step (slow; for finding defects)."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads for tensor operations in a worker; unset shares the cores out."""


class ClusterSection(BaseModel):
    """The processes and their addresses."""

    model_config = _SECTION

    workers: int = Field(default=1, ge=1, le=1024)
    """Worker actors, each with the model and both pools."""
    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that the gateway listens on; the default is reachable from this machine only."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port of the gateway's gRPC service; 0 takes a free one."""
    redis_url: SecretStr | None = None
    """Redis for the directory, as redis://…; unset starts an embedded server on a private socket."""
    api_keys: dict[TenantName, KeyDigest] = Field(default={}, repr=False)
    """SHA-256 of the API key of each tenant, by tenant; none lets everyone in."""
    tenant_secret: SecretStr | None = Field(default=None, min_length=16, max_length=1024)
    """Keeps tenants from finding each other's reused KV; unset makes a random one at each start."""
    startup_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds that the cluster may take to become ready."""


class TandemConfig(BaseSettings):
    """Everything that can be set. Made by `load_config`; frozen."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=_NESTING,
        env_parse_none_str="none",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
    )

    config_file: Path | None = None
    """YAML file to read the options from."""
    model: Path | None = None
    """Folder of the target model (safetensors); unset means the demo model."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Name that requests ask for; unset means the folder's name."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the log lines that are written."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    engine: EngineSection = EngineSection()
    cluster: ClusterSection = ClusterSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (which arrive as constructor arguments), then environment, then the YAML file."""
        flags = init_settings.init_kwargs if isinstance(init_settings, InitSettingsSource) else {}
        path = flags.get("config_file") or os.environ.get(f"{ENV_PREFIX}CONFIG_FILE")
        if not path:
            return init_settings, env_settings
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path)

    @property
    def model_name(self) -> str:
        """The name that requests ask for."""
        return self.served_model_name or (self.model.name if self.model else "smollm2-135m-instruct")

    def to_engine_config(self) -> "EngineConfig":
        """What one worker's engine is built from. `model` must be set: the CLI resolves the demo model before."""
        from cluster.engine.config import EngineConfig
        if self.model is None:
            raise ConfigError("model is unset, but must be the folder of a target model: name it on the command line.")
        engine, speculative = self.engine, self.speculative
        return EngineConfig(
            model=self.model,
            draft=speculative.model,
            method=speculative.method,
            num_speculative_tokens=speculative.num_speculative_tokens,
            ngram_min=speculative.prompt_lookup_min,
            ngram_max=speculative.prompt_lookup_max,
            suffix_max_tree_depth=speculative.suffix_decoding_max_tree_depth,
            suffix_max_cached_requests=speculative.suffix_decoding_max_cached_requests,
            suffix_max_spec_factor=speculative.suffix_decoding_max_spec_factor,
            suffix_min_token_prob=speculative.suffix_decoding_min_token_prob,
            adaptive_length=speculative.adaptive_length,
            draft_gap=speculative.draft_gap,
            tree_top_k=speculative.tree_top_k,
            tree_total_tokens=speculative.tree_total_tokens,
            allow_pickle=speculative.allow_pickle,
            dtype=engine.dtype,
            block_size=engine.block_size,
            draft_block_size=engine.draft_block_size,
            kv_bytes=int(engine.kv_cache_bytes),
            max_batch=engine.max_batch,
            max_queue=engine.max_queue,
            token_budget=engine.token_budget,
            chunk=engine.chunk,
            max_len=engine.max_model_len,
            enable_reuse=engine.reuse,
            audit=engine.audit,
            threads=engine.threads,
        )


def load_config(flags: Mapping[str, Any] | None = None) -> TandemConfig:
    """The configuration from all sources; `flags` is nested as the YAML file is, and holds only what was given.

    Raises ConfigError with one sentence that names the option, its value and the remedy.
    """
    flags = dict(flags or {})
    _refuse_unknown_environment()
    _check_file(flags.get("config_file") or os.environ.get(f"{ENV_PREFIX}CONFIG_FILE"))
    try:
        return TandemConfig(**flags)
    except ValidationError as error:
        raise ConfigError(sentence(error, list(option_names()), ENV_PREFIX, _NESTING)) from None
    except SettingsError as error:  # an environment variable that should hold JSON doesn't
        raise ConfigError(f"The environment is refused: {error}; give that variable valid JSON or unset it.") from None


def option_names(model: type[BaseModel] = TandemConfig, prefix: str = "") -> Iterator[str]:
    """Every option as a dotted path, sections left out: `engine.block_size`."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from option_names(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _refuse_unknown_environment() -> None:
    # No options of the cluster: where the demo model is kept (`cluster.models.demo`), and a client's key.
    known = {"TANDEM_CACHE", "TANDEM_API_KEY"}
    known |= {ENV_PREFIX + name.replace(".", _NESTING).upper() for name in option_names()}
    known |= {ENV_PREFIX + name.upper() for name in TandemConfig.model_fields}
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX) and variable not in known:
            hint = nearest(variable, sorted(known))
            raise ConfigError(f"{show(variable)} is in the environment, but is no option{hint}: correct or unset it.")


def _check_file(path: str | Path | None) -> None:
    """Refuse a YAML file that the settings source would skip, or answer with a traceback."""
    if not path:
        return
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"it can't be read ({error.strerror}); name a readable YAML file"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = f"it isn't valid YAML{f' (line {mark.line + 1})' if mark else ''}; correct it"
    else:
        if isinstance(content, dict | None):
            return
        reason = "it must hold a mapping of options; see docs/configuration.md"
    raise ConfigError(f"config_file is {path}, but {reason}.")
