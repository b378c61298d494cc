"""Regenerates `cluster/rpc/_generated` from `proto/`: `python -m cluster.rpc.generate [OUT]`.

Owns how protobuf code is made. Invariant: the committed code is what this makes, byte for byte (a test compares them).
Messages only: services are bound by `cluster.rpc.methods` from the descriptors, so no `_pb2_grpc` modules are needed.
Called by developers (`make proto`) and by the drift test; it needs the `dev` extra.
"""

import re
import shutil
import sys
from pathlib import Path

_SOURCES = Path(__file__).parents[2] / "proto"
_GENERATED = Path(__file__).parent / "_generated"
_PACKAGE = "cluster.rpc._generated"
_INIT = '"""Made by `python -m cluster.rpc.generate`; do not edit."""\n'


def generate(out: Path) -> None:
    """Writes the package of generated code to the folder `out`, in place of what is there."""
    from grpc_tools import protoc  # type: ignore[import-untyped]  # of the dev extra; nothing at run time imports it

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sources = sorted(str(path.relative_to(_SOURCES)) for path in _SOURCES.rglob("*.proto"))
    arguments = ["protoc", f"-I{_SOURCES}", f"--python_out={out}", f"--pyi_out={out}", *sources]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed: its messages are above.")
    for folder in [out, *(path for path in sorted(out.rglob("*")) if path.is_dir())]:
        (folder / "__init__.py").write_text(_INIT)
    for module in [*out.rglob("*_pb2.py"), *out.rglob("*_pb2.pyi")]:
        module.write_text(_package_imports(module.read_text()))


def _package_imports(code: str) -> str:
    """protoc's imports start at its -I folder; ours have to start at the package that the code lives in."""
    return re.sub(r"^from tandem\.", f"from {_PACKAGE}.tandem.", code, flags=re.MULTILINE)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else _GENERATED)
