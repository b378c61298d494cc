"""`tandem explain`: how a recent request was placed, candidate by candidate."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.cli.connection import DEFAULT_ENDPOINT, ApiKey, Endpoint
from cluster.cli.render import dash
from cluster.rpc._generated.tandem.v1 import tandem_pb2 as pb
from cluster.rpc.client import TandemClient


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="Id that the request was sent or logged with.")
    ],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    api_key: ApiKey = None,
) -> None:
    """Show why a recent request ran where it did: candidates, what they held, and the terms of their costs."""

    async def ask() -> Sequence[pb.PlacementDecision]:
        async with TandemClient(endpoint, api_key) as client:
            return await client.explain(request_id)

    console = Console(highlight=False)
    for decision in asyncio.run(ask()):
        console.print(decision_table(decision))


def decision_table(decision: pb.PlacementDecision) -> Table:
    """One row for each candidate, cheapest first, and one for each worker that could not take the request."""
    chosen = decision.worker_id if decision.HasField("worker_id") else None
    outcome = f"placed on {chosen}" if chosen else "refused"
    caption = (
        f"{outcome} {decision.age_s:,.0f} s ago; prompt of {decision.prompt_tokens:,} tokens; "
        "held: prompt tokens in the pools; costs in predicted milliseconds"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("worker")
    terms = [term.name for term in decision.candidates[0].cost] if decision.candidates else []
    for column in ("held target", "held draft", *(name.replace("_", " ") for name in terms), "cost"):
        table.add_column(column, justify="right")
    table.add_column("")
    for each in decision.candidates:
        draft = each.draft_tokens if each.HasField("draft_tokens") else None
        costs = [term.ms for term in each.cost]
        numbers = (f"{ms:,.1f}" for ms in (*costs, sum(costs)))
        note = "chosen" if each.worker_id == chosen else ""
        table.add_row(each.worker_id, f"{each.target_tokens:,}", dash(draft, ","), *numbers, note)
    for other in decision.passed_over:
        table.add_row(other.worker_id, *("-" for _ in range(len(terms) + 3)), other.reason)
    return table
