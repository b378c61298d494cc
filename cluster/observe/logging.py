"""Log lines of the form `time level event=… key=value …`, one per event.

Owns the format and the one line that every request ends with. Invariant: an event is one line of output, and holds no
prompt and no generated text. `setup` is called once by each process at its start; everything else logs through Python's
own `logging` with `event(...)` as the message.
"""

import logging
import re
import sys
import time
from typing import TextIO

_PLAIN = re.compile(r"[\w.,:;/@%+\-\[\]]+\Z", re.ASCII)


def event(name: str, **fields: object) -> str:
    """A message such as `event=worker_ready worker=worker-0 took_s=3.2`; fields that are None are left out."""
    parts = [f"event={_value(name)}"]
    parts += [f"{key}={_value(value)}" for key, value in fields.items() if value is not None]
    return " ".join(parts)


def setup(level: str, stream: TextIO | None = None) -> None:
    """Sends all logging of this process, from `level` up, to `stream` (stderr by default) as key=value lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage()
        if not message.startswith("event="):
            message = f"event=log text={_value(message)}"
        line = f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower()} {message} logger={record.name}"
        if record.exc_info:
            line += f" trace={_value(self.formatException(record.exc_info))}"
        return line


def _value(value: object) -> str:
    """The value as one word: floats short; quoted if it has blanks or quotes in it, with line breaks escaped."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _PLAIN.match(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else repr(char)[1:-1] for char in escaped) + '"'
