"""Command-line flags for every option of the configuration, derived from `TandemConfig` itself.

Invariant: an option added to the configuration is a flag at once, with its docstring as help; values go to pydantic as
they were typed, so a wrong one gives the same sentence whether it came by flag, environment or file. Used by `serve`.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import ClusterSection, EngineSection, TandemConfig
from cluster.errors import ConfigError, show

Flags = dict[str, Any]
_ALIASES = {"max_batch": ["--max-num-seqs"], "token_budget": ["--max-num-batched-tokens"]}
# The model is an argument, sections have flags of their own, and secrets would show in `ps`.
_NOT_FLAGS = ("model", "speculative", "engine", "cluster", "redis_url", "api_keys", "tenant_secret")


@dataclass(frozen=True)
class _Flag:
    """One option of the configuration as a flag; `section` is empty for those at the top."""

    section: str
    name: str
    field: FieldInfo

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as a keyword parameter in Typer's terms."""
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=self._annotation())

    def _annotation(self) -> Any:
        dashed = self.name.replace("_", "-")
        switch = self.field.annotation is bool
        names = [f"--{dashed}/--no-{dashed}"] if switch else [f"--{dashed}", *_ALIASES.get(self.name, ())]
        option = typer.Option(
            *names,
            help=f"{self.field.description or ''}{self._default()}",
            rich_help_panel=f"{self.section or 'general'} options".capitalize(),
            metavar=None if switch else "VALUE",
            show_default=False,
        )
        return Annotated[bool | None if switch else str | None, option]

    def _default(self) -> str:
        default = self.field.default
        if default is None:
            return ""
        human = getattr(default, "human_readable", None)
        return f" Default: {human() if human else default}."


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the command's parameter `flags` by one option for each option of the configuration.

    The command receives in `flags` what was given, nested as in the YAML file.
    """
    flags = list(_flags())

    @functools.wraps(command)
    def wrapper(*args: Any, **given: Any) -> None:
        nested: Flags = {}
        for flag in flags:
            value = given.pop(flag.name)
            if value is None:
                continue
            section = nested.setdefault(flag.section, {}) if flag.section else nested
            section[flag.name] = None if value == "none" else value
        command(*args, **given, flags=nested)

    own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "flags"]
    parameters = own + [flag.parameter for flag in flags]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads the signature from here
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def speculative_flag(text: str | None) -> Flags:
    """The `speculative` section from the JSON of `--speculative-config`; nothing if it wasn't given."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        value = error
    if not isinstance(value, dict):
        raise ConfigError(
            f"--speculative-config is {show(text)}, but must be a JSON object, "
            """such as '{"method": "ngram", "num_speculative_tokens": 3}': correct it."""
        )
    return {"speculative": value}


def model_flag(model: Path | None) -> Flags:
    """The option `model` from the command's argument; nothing if it wasn't given."""
    return {} if model is None else {"model": model}


def _flags() -> Iterator[_Flag]:
    sections: Mapping[str, type[BaseModel]] = {"": TandemConfig, "engine": EngineSection, "cluster": ClusterSection}
    for section, model in sections.items():
        for name, field in model.model_fields.items():
            if name not in _NOT_FLAGS:
                yield _Flag(section, name, field)
