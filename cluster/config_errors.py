"""Sentences for a wrong configuration: option, value, what it must be, remedy.

Invariant: one sentence whatever the number of problems, and never the value of a secret. Called by `cluster.config`.
"""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from cluster.errors import show

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_SECRETS = ("redis_url", "api_keys", "tenant_secret")
_REASONS = {
    "byte_size": "a size such as 2GiB or 500MB",
    "byte_size_unit": "a size such as 2GiB or 500MB",
    "model_type": "a mapping of options",
    "model_attributes_type": "a mapping of options",
}


def sentence(error: ValidationError, options: Sequence[str], env_prefix: str, nesting: str) -> str:
    """The first problem, and how many follow it."""
    problems = error.errors(include_url=False)
    rest = f" ({len(problems) - 1} more wrong after this one)" if len(problems) > 1 else ""
    return f"{_problem(problems[0], options, env_prefix, nesting)}{rest}."


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean X?)`, or nothing where no name is close."""
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]}?)" if match else ""


def _problem(problem: "ErrorDetails", options: Sequence[str], env_prefix: str, nesting: str) -> str:
    option = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{option} is no option{nearest(option, options)}: correct or remove it"
    known = next((name for name in options if f"{option}.".startswith(f"{name}.")), None)  # may hold what is wrong
    if problem["type"] == "value_error" and known is None:  # a section whose options disagree
        return f"{option} is refused: {_reason(problem)}"
    known = known or option
    value = "as given" if known.rpartition(".")[2] in _SECRETS else show(problem["input"])
    variable = env_prefix + known.replace(".", nesting).upper()
    return f"{option} is {value}, but must be {_reason(problem)}: correct it (by flag, {variable} or YAML file)"


def _reason(problem: "ErrorDetails") -> str:
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ").rstrip(".")
    return _REASONS.get(problem["type"], text)
