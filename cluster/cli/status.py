"""`tandem status`: the workers of a running cluster, their load and their pools."""

import asyncio

from rich.console import Console

from cluster.cli.connection import DEFAULT_ENDPOINT, ApiKey, Endpoint, cluster_status
from cluster.cli.render import cluster_box, workers_table


def status(endpoint: Endpoint = DEFAULT_ENDPOINT, api_key: ApiKey = None) -> None:
    """Show a running cluster's model, workers and pools."""
    answer = asyncio.run(cluster_status(endpoint, api_key))
    console = Console(highlight=False)
    console.print(cluster_box(answer, endpoint))
    console.print(workers_table(answer.workers))
