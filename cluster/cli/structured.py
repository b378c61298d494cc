"""Command-line options that give an answer its form, and the part of a request that they make.

Invariant: at most one of them is used. Used by `generate`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.errors import InvalidRequest

JsonSchema = Annotated[
    Path | None, typer.Option("--json-schema", metavar="FILE", help="Answer with JSON that fits this JSON Schema.")
]
JsonObject = Annotated[bool, typer.Option("--json", help="Answer with a JSON object.")]
Regex = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="Answer with a text that this matches as a whole.")
]
Ebnf = Annotated[
    Path | None, typer.Option("--ebnf", metavar="FILE", help="Answer with a text of this grammar (Lark's syntax).")
]


def structured_output(
    json_schema: Path | None, json_object: bool, regex: str | None, ebnf: Path | None
) -> dict[str, Any] | None:
    """The value of `structured_output` in a request; None without any of these.

    Raises InvalidRequest for more than one of them, or a file that can't be read.
    """
    forms: dict[str, Any] = {
        "--json-schema": None if json_schema is None else {"json_schema": _read("--json-schema", json_schema)},
        "--json": {"json_object": {}} if json_object else None,
        "--regex": None if regex is None else {"regex": regex},
        "--ebnf": None if ebnf is None else {"ebnf": _read("--ebnf", ebnf)},
    }
    asked = {option: form for option, form in forms.items() if form is not None}
    if len(asked) > 1:
        raise InvalidRequest("the form of the answer", " and ".join(asked), "one of these", "leave out all but one")
    return next(iter(asked.values()), None)


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8"
        raise InvalidRequest(
            option, str(path), f"a text file that can be read ({reason})", "name another file"
        ) from error
