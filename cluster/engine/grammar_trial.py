"""A process of its own in which a grammar is tried before a worker touches it.

Native code that compiles a grammar can't be interrupted, and some short grammars make it run for minutes or crash. So
each new one is compiled here first, under limits on CPU time, memory and stack; where that kills the process, the
grammar is refused and the next trial starts a new one. Invariant: what passed compiles in the worker as well, with more
stack and in as little time. The process ends with its parent: it reads stdin, and no trial outlives its CPU limit.
Run by `GrammarTrial`, which `cluster.engine.grammar` uses; it imports neither torch nor the engine.

Lines of JSON: first a tokenizer's `tokenizer.json`; then, for each grammar, one line in and one line out: the error, or
an empty string.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_SECONDS = 1.0
_MEMORY_BYTES = 2 * 2**30
_STACK_BYTES = 2 * 2**20

LIMITS = LLParserLimits(max_items_in_row=10_000, max_lexer_states=20_000, step_lexer_fuel=100_000, verbose_errors=False)
"""Bounds on one mask: some ten milliseconds of work, and 40 MB for all that a grammar ever needs."""


class GrammarTrial:
    """Tries grammars, one at a time; from one thread. `tokenizer` is the text of a tokenizer.json."""

    def __init__(self, tokenizer: str, end_id: int) -> None:
        self._greeting = json.dumps({"tokenizer": tokenizer, "end_id": end_id})
        self._process: subprocess.Popen[str] | None = None

    def error_of(self, grammar: str) -> str | None:
        """What is wrong with a grammar in llguidance's JSON form; None if nothing is.

        Raises RuntimeError if the process doesn't start.
        """
        alive = self._process is not None and self._process.poll() is None
        process = self._process if self._process is not None and alive else self._start()
        answer = _ask(process, json.dumps(grammar))
        if not answer:
            self.close()
            return "compiling it takes too much time or memory"
        return str(json.loads(answer)) or None

    def close(self) -> None:
        """End the process; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # traces of native code; its errors come as answers
            text=True,
            start_new_session=True,  # so that Ctrl-C on the terminal is for the worker alone
        )
        if not _ask(self._process, self._greeting):
            raise RuntimeError("the process in which grammars are tried doesn't start")
        return self._process


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """The line that answers; empty if the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a trial talks through pipes")
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def compiled_state(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The state at the start of `grammar`, with its first mask computed. Raises ValueError if it is wrong or empty."""
    state = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not state.is_error():
        mask = state.compute_bitmask()
        if not state.is_error() and not any(mask):
            raise ValueError("no text fits it")
    if state.is_error():
        raise ValueError(state.get_error())
    return state


def _serve() -> None:
    greeting = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(greeting["tokenizer"], eos_token=[greeting["end_id"]])
    _answer("")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, whatever it is doing
        try:
            compiled_state(tokenizer, json.loads(line))
            _answer("")
        except ValueError as error:
            _answer(str(error) or "it can't be compiled")
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(error: str) -> None:
    print(json.dumps(error), flush=True)


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
