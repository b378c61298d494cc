"""Limits on the grammar that a request wants its output to have.

Invariant: what passes is short and shallow, so that reading it is cheap everywhere; whether it means anything is for
the worker to say, which compiles it (`cluster.engine.grammar`). Called by the validator.
"""

import json
from typing import Any

from cluster.core.sampling import Grammar, GrammarKind
from cluster.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 65_536
MAX_SCHEMA_LEVELS = 64


def check_grammar(grammar: Grammar) -> None:
    """Raises InvalidRequest for a grammar that is empty, too long, too deep, or a schema that is no JSON object."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return
    field = f"structured_output.{grammar.kind}"
    if not grammar.text:
        raise InvalidRequest(
            field, "empty", f"1 to {MAX_GRAMMAR_CHARS} characters", "say what the output must look like"
        )
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        length = f"{len(grammar.text)} characters long"
        raise InvalidRequest(field, length, f"at most {MAX_GRAMMAR_CHARS} characters", "shorten it")
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        _check_schema(field, grammar.text)


def _check_schema(field: str, text: str) -> None:
    too_deep = InvalidRequest(
        field, "nested too deeply", f"at most {MAX_SCHEMA_LEVELS} levels deep", "flatten it, or refer to $defs"
    )
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(field, text, f"JSON ({error})", "send the schema as JSON text") from error
    except RecursionError:
        raise too_deep from None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, text, "a JSON object", 'send a schema such as {"type": "object"}')
    if _levels(schema) > MAX_SCHEMA_LEVELS:
        raise too_deep


def _levels(value: Any) -> int:
    """How many containers lie within each other."""
    level, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, dict | list)]:
        level += 1
        inside = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
    return level
