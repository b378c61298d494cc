"""Routing runs where nothing is installed, and starting a cluster doesn't load what only its workers need."""

import pkgutil
import subprocess
import sys

import cluster.routing


def modules_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_routing_brings_no_dependency_along() -> None:
    modules = [f"cluster.routing.{module.name}" for module in pkgutil.iter_modules(cluster.routing.__path__)]
    assert len(modules) > 5
    loaded = modules_after(f"import {', '.join(modules)}")
    assert not {"torch", "numpy", "ray", "grpc", "redis", "transformers", "pydantic"} & loaded


def test_who_starts_a_cluster_loads_neither_torch_nor_transformers() -> None:
    loaded = modules_after("import actors.cluster")
    assert "ray" in loaded
    assert not {"torch", "transformers"} & loaded
