"""Starting a cluster from a command.

Owns what `serve` and `demo` share: the demo model in place of a missing one, progress on the terminal, the box.
Invariant: the cluster is stopped however the block ends. All of Ray stays behind `actors.cluster`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.cli.connection import cluster_status
from cluster.cli.progress import Stages
from cluster.cli.render import cluster_box
from cluster.config import SpeculativeConfig, TandemConfig
from cluster.speculation.lookahead import SpeculationMethod

if TYPE_CHECKING:
    from actors.cluster import RunningCluster


@contextmanager
def running_cluster(config: TandemConfig, console: Console) -> Iterator["RunningCluster"]:
    """A cluster that serves; progress and the box that describes it go to `console`."""
    with Stages(console) as stage:
        if config.model is None:
            stage("Preparing the demo model")
            config = with_demo_model(config)
        from actors.cluster import start_cluster

        cluster = start_cluster(config, stage)
    with cluster:
        console.print(cluster_box(asyncio.run(cluster_status(cluster.endpoint, cluster.api_key)), cluster.endpoint))
        try:
            yield cluster
        finally:
            console.print("Stopping …")


def with_demo_model(config: TandemConfig) -> TandemConfig:
    """The configuration with the demo model and, unless speculation was configured, the draft that comes with it."""
    from cluster.models.demo import demo_draft, demo_target

    updates: dict[str, object] = {"model": demo_target(), "served_model_name": config.model_name}
    if "speculative" not in config.model_fields_set:
        updates["speculative"] = SpeculativeConfig(method=SpeculationMethod.EAGLE3, model=demo_draft())
    return config.model_copy(update=updates)
