"""Builds the drafter that a configuration asks for, or says in one sentence why it can't.

Invariant: a drafter that comes out of here fits its target (vocabulary, hidden size, layers) and has passed the span
check. Called by the engine at start-up.
"""

from pathlib import Path
from typing import cast

from torch import Tensor

from cluster.engine.config import EngineConfig
from cluster.engine.model import LoadedModel, load_target
from cluster.engine.sampler import Sampler
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ConfigError, ModelLoadError
from cluster.speculation.draft_model import ModelDrafter
from cluster.speculation.eagle3 import Eagle3Drafter
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.ngram import NgramDrafter
from cluster.speculation.protocol import Drafter
from cluster.speculation.span_check import check_span


def load_drafter(config: EngineConfig, target: LoadedModel, sampler: Sampler) -> Drafter | None:
    """The drafter of `config.method` for `target`, without a pool yet (`Drafter.attach`); None for method none.

    `sampler` is the one that verifies. Raises ConfigError if the method needs a draft folder and none is named, and
    ModelLoadError for a draft that doesn't fit or can't be loaded.
    """
    drafts = config.num_speculative_tokens
    if config.method is SpeculationMethod.NONE:
        return None
    if config.method is SpeculationMethod.NGRAM:
        return NgramDrafter(drafts, config.ngram_min, config.ngram_max)
    if config.draft is None:
        raise ConfigError(
            f"draft is not set, but speculation method {config.method} needs one: name the draft's folder."
        )
    drafter: Drafter
    if config.method is SpeculationMethod.DRAFT_MODEL:
        drafter = _load_model(config.draft, config, target, sampler)
    else:
        drafter = _load_eagle3(config.draft, target, sampler, drafts)
    check_span(drafter, target)
    return drafter


def _load_model(folder: Path, config: EngineConfig, target: LoadedModel, sampler: Sampler) -> ModelDrafter:
    draft = load_target(folder, config.dtype, target.device)
    _check_vocabulary(config.model, target.vocab_size, folder, draft.vocab_size)
    return ModelDrafter(draft, sampler, config.num_speculative_tokens)


def _check_vocabulary(target: Path, target_size: int, draft: Path, draft_size: int) -> None:
    """Refuse a draft whose token ids mean something else than the target's.

    Sizes of the embeddings may differ by padding, so tokens are compared where both folders hold a tokenizer.
    """
    if not all((folder / "tokenizer.json").is_file() for folder in (target, draft)):
        if target_size != draft_size:
            raise _different(f"it has {draft_size} tokens, the target {target_size}")
        return
    ours, theirs = (Tokenizer.load(folder).vocabulary() for folder in (target, draft))
    if ours != theirs:
        token, token_id = min(ours.items() ^ theirs.items(), key=lambda entry: entry[1])
        owner = "target" if ours.get(token) == token_id else "draft"
        raise _different(
            f"it has {len(theirs)} tokens, the target {len(ours)}; token {token_id} is {token!r} in the {owner} only"
        )
    needed = max(ours.values()) + 1
    if draft_size < needed:
        raise _different(f"its embedding has {draft_size} rows for {needed} tokens")


def _different(how: str) -> ModelLoadError:
    return ModelLoadError(
        f"The draft's vocabulary is not the target's ({how}): use a draft with the same tokenizer, or another method."
    )


def _load_eagle3(folder: Path, target: LoadedModel, sampler: Sampler, drafts: int) -> Eagle3Drafter:
    embedding = cast(Tensor, target.model.get_input_embeddings().weight)
    head = Eagle3Head.load(folder, embedding, target.dtype, target.num_layers).to(target.device)
    _check_fit(folder, "hidden states of size", head.config.target_hidden_size, target.hidden_size, exact=True)
    _check_fit(folder, "layer", max(head.aux_layer_ids), target.num_layers, exact=False)
    if head.config.vocab_size != target.vocab_size:
        raise _different(f"it has {head.config.vocab_size} tokens, the target {target.vocab_size}")
    return Eagle3Drafter(head, sampler, drafts)


def _check_fit(folder: Path, what: str, reads: int, given: int, exact: bool) -> None:
    if reads > given or (exact and reads != given):
        raise ModelLoadError(
            f"The EAGLE3 head in {folder} reads {what} {reads}, but the target has {given}: "
            "use the head that was trained for this target."
        )
