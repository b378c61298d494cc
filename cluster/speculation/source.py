"""What a drafter is built from, and the checks that every draft must pass against its target.

Invariant: a draft whose token ids mean something else than the target's, or that reads states which the target hasn't
got, is refused in one sentence. Read by the modes' `build` functions; made by the factory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.engine.config import EngineConfig
from cluster.engine.model import LoadedModel
from cluster.engine.sampler import Sampler
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ModelLoadError
from cluster.speculation.tree import TreeShape

# Embeddings are padded to multiples of up to 512 rows, by each side in its own way.
_MOST_PADDING = 1024


@dataclass(frozen=True, slots=True)
class DraftSource:
    """`folder` holds the draft: the one that was named, or the target's own for a method that finds its draft there.

    `sampler` is the one that verifies: its vocabulary decides which tokens exist."""

    folder: Path
    config: EngineConfig
    target: LoadedModel
    sampler: Sampler

    @property
    def max_drafts(self) -> int:
        """K, as configured."""
        return self.config.num_speculative_tokens

    @property
    def tree(self) -> TreeShape | None:
        """How wide trees of drafts are, as configured; None for chains."""
        wide = self.config.tree_top_k > 1
        return TreeShape(self.config.tree_top_k, self.config.tree_total_tokens) if wide else None

    def check_vocabulary(self, draft_size: int, mask: int | None = None) -> None:
        """Refuse a draft of `draft_size` token ids whose ids mean something else than the target's.

        Sizes of the embeddings may differ by padding, so tokens are compared where both folders hold a tokenizer.
        `mask` is an id that the draft may have to itself.
        """
        folders = (self.config.model, self.folder)
        if not all((folder / "tokenizer.json").is_file() for folder in folders):
            if self.target.vocab_size != draft_size:
                raise different_vocabulary(f"it has {draft_size} tokens, the target {self.target.vocab_size}")
            return
        ours, theirs = (Tokenizer.load(folder).vocabulary() for folder in folders)
        if mask not in ours.values():
            theirs = {token: token_id for token, token_id in theirs.items() if token_id != mask}
        if ours != theirs:
            token, token_id = min(ours.items() ^ theirs.items(), key=lambda entry: entry[1])
            owner = "target" if ours.get(token) == token_id else "draft"
            raise different_vocabulary(
                f"it has {len(theirs)} tokens, the target {len(ours)}; "
                f"token {token_id} is {token!r} in the {owner} only"
            )
        needed = max(ours.values()) + 1
        if draft_size < needed:
            raise different_vocabulary(f"its embedding has {draft_size} rows for {needed} tokens")

    def check_rows(self, rows: int) -> None:
        """Refuse a head, which brings no tokenizer, if its `rows` token ids are too few, or too many for padding."""
        padding = abs(rows - self.target.vocab_size)
        if rows < self.sampler.vocab_size or padding > _MOST_PADDING:
            raise different_vocabulary(f"it has {rows} tokens, the target {self.target.vocab_size}")

    def check_hidden(self, what: str, hidden_size: int, layers: tuple[int, ...]) -> None:
        """Refuse `what` ("EAGLE3 head") if it reads states of another size, or of `layers` that the target lacks."""
        reads = [("hidden states of size", hidden_size, self.target.hidden_size, True)]
        reads += [("layer", max(layers), self.target.num_layers, False)] if layers else []
        for name, wanted, given, exact in reads:
            if wanted > given or (exact and wanted != given):
                raise ModelLoadError(
                    f"The {what} in {self.folder} reads {name} {wanted}, but the target has {given}: "
                    "use the one that was trained for this target."
                )


def different_vocabulary(how: str) -> ModelLoadError:
    """The refusal of a draft that speaks in other tokens."""
    return ModelLoadError(
        f"The draft's vocabulary is not the target's ({how}): use a draft with the same tokenizer, or another method."
    )
