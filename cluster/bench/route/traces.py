"""Workloads from public traces: Mooncake's, whose requests name their blocks, and Azure's, which have lengths only.

Mooncake: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each
block of 512 tokens, equal where prompts are equal so far; the last block may be partial. Azure: CSV with a header, of
`TIMESTAMP,ContextTokens,GeneratedTokens`. A run takes a stretch of the trace that begins at random, with the pauses
between requests scaled by one factor so that it loads the cluster as demanded.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cluster.bench.route.arrivals import Demand, Turn, as_request, rate
from cluster.bench.route.request import BlockNumbers, Workload
from cluster.errors import ConfigError

MOONCAKE_BLOCK, AZURE_BLOCK = 512, 128


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a trace: when (seconds), and its blocks if the trace names them."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None


def read_mooncake(path: Path) -> list[Record]:
    """Raises ConfigError for a file that isn't such a trace."""
    records: list[Record] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                blocks = tuple(map(int, row["hash_ids"]))
                tokens, answer = int(row["input_length"]), int(row["output_length"])
                records.append(Record(row["timestamp"] / 1000.0, max(1, tokens), max(1, answer), blocks))
            except (ValueError, KeyError, TypeError) as error:
                raise _not_a_trace(path, number, "timestamp, input_length, output_length and hash_ids", error) from None
    return records


def read_azure(path: Path) -> list[Record]:
    """Raises ConfigError for a file that isn't such a trace."""
    records: list[Record] = []
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
                tokens, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _not_a_trace(path, number, "TIMESTAMP, ContextTokens and GeneratedTokens", error) from None
            records.append(Record(at, max(1, tokens), max(1, answer), None))
    return records


def trace_workload(
    name: str, records: Sequence[Record], block_size: int, demand: Demand, rng: random.Random, plain: float = 0.0
) -> Workload:
    """`plain` is the share of requests that don't speculate."""
    count = min(demand.requests, len(records))
    first = rng.randrange(len(records) - count + 1)
    stretch = records[first : first + count]
    numbers = BlockNumbers(1 + max((max(r.blocks) for r in stretch if r.blocks), default=0))
    turns = [_turn(record, block_size, numbers, rng, plain) for record in stretch]
    natural = max(stretch[-1].at - stretch[0].at, 1e-3)
    scale = count / rate(turns, demand, block_size) / natural
    requests = [
        as_request(number, (record.at - stretch[0].at) * scale, _session(turn), turn)
        for number, (record, turn) in enumerate(zip(stretch, turns, strict=True))
    ]
    return Workload(name, block_size, tuple(requests))


def _turn(record: Record, block_size: int, numbers: BlockNumbers, rng: random.Random, plain: float) -> Turn:
    full = record.prompt_tokens // block_size
    blocks = record.blocks[:full] if record.blocks is not None else numbers.fresh(full)
    speculative, acceptance = rng.random() >= plain, rng.uniform(2.0, 2.8)
    return Turn(record.prompt_tokens, record.output_tokens, blocks, blocks, speculative, acceptance)


def _session(turn: Turn) -> int:
    # Traces carry no session. The first block is a system prompt that all share; the second tells conversations apart.
    return turn.prompt[1] if len(turn.prompt) > 1 else -turn.prompt_tokens


def _not_a_trace(path: Path, line: int, fields: str, error: Exception) -> ConfigError:
    return ConfigError(f"line {line} of {path} must have {fields}: {type(error).__name__} {error}; check the file.")
