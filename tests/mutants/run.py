"""Shows that every deliberate bug in `bugs.py` is caught by the test it names: `make mutants`.

Each bug is applied to a copy of the sources, never to the working tree. Exits with 1 if a bug survives, or if a test
fails without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Prints one line per bug."""
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as folder:
        copy = Path(folder)
        for name in ("cluster", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "models", "*.db"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if not _passes(copy, sorted({bug.test for bug in BUGS})):
            print("The tests fail without any bug: mend them first.")
            return 1
        survivors = [bug for bug in BUGS if not _caught(copy, bug)]
    print(f"{len(BUGS) - len(survivors)} of {len(BUGS)} bugs caught.")
    return 1 if survivors else 0


def _caught(copy: Path, bug: Bug) -> bool:
    path = copy / "cluster" / "core" / bug.file
    source = path.read_text()
    if source.count(bug.old) != 1:
        print(f"MISSING   {bug.what}: its place in {bug.file} has changed")
        return False
    path.write_text(source.replace(bug.old, bug.new))
    caught = not _passes(copy, [bug.test])
    path.write_text(source)
    print(f"{'caught' if caught else 'SURVIVED':9} {bug.what}  [{bug.test.split('::')[1]}]", flush=True)
    return caught


def _passes(copy: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
