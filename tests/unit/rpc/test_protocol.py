"""The protocol files: linted, documented, and the committed code is what they generate."""

import filecmp
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.rpc import generate

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "proto"
GENERATED = ROOT / "cluster/rpc/_generated"


def test_buf_finds_nothing_to_say_and_every_field_is_commented() -> None:
    buf = shutil.which("buf", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    assert buf is not None, "buf-bin of the dev extra is missing"
    result = subprocess.run([buf, "lint", str(PROTO)], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("", 0)


def test_the_committed_code_is_what_the_sources_generate(tmp_path: Path) -> None:
    # protoc registers the files of its process, so that a second run in this one would clash with the imported modules.
    subprocess.run([sys.executable, generate.__file__, str(tmp_path / "out")], check=True, timeout=60)
    made = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.py*") if path.is_file()}
    committed = {path.relative_to(GENERATED) for path in GENERATED.rglob("*.py*") if "__pycache__" not in path.parts}
    assert made == committed
    different = [path for path in made if not filecmp.cmp(tmp_path / "out" / path, GENERATED / path, shallow=False)]
    assert different == [], "run `python -m cluster.rpc.generate` and commit the result"


def test_the_folder_of_sources_shadows_no_package() -> None:
    # proto-plus, which Ray's dependencies use, is imported as `proto`.
    assert list(PROTO.rglob("*.py")) == []


def test_generated_modules_import_by_their_package() -> None:
    for name in ("tandem.v1.tandem_pb2", "tandem.internal.v1.worker_pb2"):
        assert importlib.util.find_spec(f"cluster.rpc._generated.{name}") is not None
    assert not any(name == "tandem" or name.startswith("tandem.") for name in sys.modules)
