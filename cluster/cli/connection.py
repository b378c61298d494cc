"""What commands share in talking to a running cluster: endpoint and key, sampling options, streaming an answer.

Invariant: leaving `stream_answer` in any way ends the request on the server too. Used by `generate`, `chat`, `status`
and `demo`.
"""

from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated, Any

import typer

from cluster.rpc._generated.tandem.v1 import tandem_pb2 as pb
from cluster.rpc.client import Prompt, TandemClient

DEFAULT_ENDPOINT = "127.0.0.1:50051"
Endpoint = Annotated[str, typer.Option("--endpoint", metavar="HOST:PORT", help="Where the cluster listens.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="TANDEM_API_KEY",
        metavar="KEY",
        help="Key for a cluster that asks for one; other users of this machine can see the flag, not the variable.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="0 always takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Sample among the K likeliest tokens only.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Sample among the likeliest tokens of this total only.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Makes sampling repeatable.")]


async def stream_answer(
    client: TandemClient, prompt: Prompt, show: Callable[[str], None], **options: Any
) -> tuple[str, pb.Completion]:
    """Passes each piece of text to `show` as it comes; returns the whole text and how it ended.

    `options` are those of `TandemClient.generate`.
    """
    pieces: list[str] = []
    completion = pb.Completion()
    async with aclosing(client.generate(prompt, **options)) as responses:
        async for response in responses:
            if response.HasField("completion"):
                completion = response.completion
            elif response.delta.text:
                pieces.append(response.delta.text)
                show(response.delta.text)
    return "".join(pieces), completion


async def cluster_status(endpoint: str, api_key: str | None) -> pb.ClusterStatusResponse:
    """The status of the cluster at `endpoint`. Raises Unavailable if nobody answers there."""
    async with TandemClient(endpoint, api_key) as client:
        return await client.status()
