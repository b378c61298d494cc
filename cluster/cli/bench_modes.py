"""What `tandem bench modes` is given and prints: folders of models, and its table.

Invariant: an unknown mode is refused with those that exist. Called by `cluster.cli.bench`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich import box
from rich.table import Table

from cluster.bench.modes import ModeFigures
from cluster.errors import ConfigError
from cluster.speculation.lookahead import DraftFolder, SpeculationMethod, draft_folder


def tiny_models(folder: Path) -> tuple[Path, dict[SpeculationMethod, Path]]:
    """The tests' tiny target and drafts. Raises ConfigError outside of a checkout, which alone has them."""
    if not folder.is_dir():
        raise ConfigError(
            "target is not set, and the tests' tiny models are in a source checkout only: name a target and its drafts "
            "(--target DIR --draft MODE=DIR)."
        )
    named = {SpeculationMethod.DRAFT_MODEL: folder / "tiny-draft"}
    for method in SpeculationMethod:
        if draft_folder(method) is not DraftFolder.NEVER:
            named.setdefault(method, folder / f"tiny-{method.replace('_', '-')}")
    return folder / "tiny-target", {method: draft for method, draft in named.items() if draft.is_dir()}


def drafts_by_mode(given: Iterable[str]) -> dict[SpeculationMethod, Path]:
    """Each `MODE=DIR`. Raises ConfigError for another form, or a mode that doesn't exist or takes no draft."""
    drafts: dict[SpeculationMethod, Path] = {}
    takers = [str(method) for method in SpeculationMethod if draft_folder(method) is not DraftFolder.NEVER]
    for entry in given:
        mode, equals, folder = entry.partition("=")
        if not equals or not folder or mode not in takers:
            raise ConfigError(f"draft is {entry!r}, but must be MODE=DIR with one of {', '.join(takers)}: correct it.")
        drafts[SpeculationMethod(mode)] = Path(folder)
    return drafts


def modes_table(figures: Mapping[str, ModeFigures]) -> Table:
    """One row for each mode."""
    caption = "One request at a time, 3 drafts deep; draft bytes: KV of a token; reuse: of a chat's earlier tokens"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("mode", no_wrap=True)
    for name in ("tokens a step", "tokens/s", "vs none", "draft bytes", "reuse"):
        table.add_column(name, justify="right")
    for mode, found in figures.items():
        speed = (f"{found.acceptance:.2f}", f"{found.tokens_per_s:.0f}", f"{found.vs_none:.2f}")
        table.add_row(mode, *speed, f"{found.draft_bytes_per_token:,}", f"{found.reuse:.1%}")
    return table
