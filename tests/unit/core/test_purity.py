"""The core runs where nothing is installed."""

import pkgutil
import subprocess
import sys

import cluster.core

HEAVY = {"torch", "numpy", "ray", "grpc", "redis", "transformers", "pydantic"}


def test_no_module_of_the_core_brings_a_dependency_along() -> None:
    modules = [f"cluster.core.{module.name}" for module in pkgutil.iter_modules(cluster.core.__path__)]
    assert len(modules) > 10
    script = f"import sys, {', '.join(modules)}\nprint(*sorted(name.split('.')[0] for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)
