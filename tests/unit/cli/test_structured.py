"""The form of an answer, from options of the command line to the part of the request."""

from pathlib import Path

import pytest

from cluster.cli.structured import structured_output
from cluster.core.sampling import Grammar, GrammarKind
from cluster.errors import InvalidRequest
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.convert import grammar_from_wire


def test_each_option_asks_for_its_form(tmp_path: Path) -> None:
    file = tmp_path / "form"
    file.write_text("{ é }", encoding="utf-8")
    for arguments, expected in [
        ((file, False, None, None), Grammar(GrammarKind.JSON_SCHEMA, "{ é }")),
        ((None, True, None, None), Grammar(GrammarKind.JSON_OBJECT)),
        ((None, False, "", None), Grammar(GrammarKind.REGEX, "")),
        ((None, False, None, file), Grammar(GrammarKind.EBNF, "{ é }")),
    ]:
        params = tandem_pb2.SamplingParams(structured_output=structured_output(*arguments))
        assert grammar_from_wire(params.structured_output) == expected
    assert structured_output(None, False, None, None) is None


def test_two_forms_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--json and --regex, but must be one of these"):
        structured_output(None, True, "a", None)
    with pytest.raises(InvalidRequest, match=r"--ebnf is .*No such file"):
        structured_output(None, False, None, tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match=r"--json-schema is .*UTF-8"):
        structured_output(tmp_path / "binary", False, None, None)
