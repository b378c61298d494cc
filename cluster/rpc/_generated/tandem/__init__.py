"""Made by `python -m cluster.rpc.generate`; do not edit."""
