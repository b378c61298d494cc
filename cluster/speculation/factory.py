"""Builds the drafter that a configuration asks for, or says in one sentence why it can't.

Invariant: a drafter that comes out of here fits its target (vocabulary, hidden size, layers) and has passed the span
check. Called by the engine at start-up.
"""

from collections.abc import Callable

from cluster.engine.config import EngineConfig
from cluster.engine.model import LoadedModel
from cluster.engine.sampler import Sampler
from cluster.errors import ConfigError
from cluster.speculation.dflash import build_dflash
from cluster.speculation.draft_model import build_draft_model
from cluster.speculation.eagle import build_eagle
from cluster.speculation.eagle3 import build_eagle3
from cluster.speculation.lookahead import DraftFolder, SpeculationMethod, draft_folder
from cluster.speculation.medusa import build_medusa
from cluster.speculation.mtp import build_mtp, build_mtp_eagle
from cluster.speculation.ngram import build_ngram
from cluster.speculation.pard import build_pard
from cluster.speculation.peagle import build_peagle
from cluster.speculation.protocol import Drafter
from cluster.speculation.source import DraftSource
from cluster.speculation.span_check import check_span
from cluster.speculation.suffix import build_suffix

_BUILDERS: dict[SpeculationMethod, Callable[[DraftSource], Drafter]] = {
    SpeculationMethod.NGRAM: build_ngram,
    SpeculationMethod.SUFFIX: build_suffix,
    SpeculationMethod.DRAFT_MODEL: build_draft_model,
    SpeculationMethod.PARD: build_pard,
    SpeculationMethod.DFLASH: build_dflash,
    SpeculationMethod.EAGLE: build_eagle,
    SpeculationMethod.EAGLE3: build_eagle3,
    SpeculationMethod.PEAGLE: build_peagle,
    SpeculationMethod.MTP_EAGLE: build_mtp_eagle,
    SpeculationMethod.MTP: build_mtp,
    SpeculationMethod.MEDUSA: build_medusa,
}


def load_drafter(config: EngineConfig, target: LoadedModel, sampler: Sampler) -> Drafter | None:
    """The drafter of `config.method` for `target`, without a pool yet (`Drafter.attach`); None for method none.

    `sampler` is the one that verifies. Raises ConfigError if the method needs a draft folder and none is named, and
    ModelLoadError for a draft that doesn't fit or can't be loaded.
    """
    if config.method is SpeculationMethod.NONE:
        return None
    if config.draft is None and draft_folder(config.method) is DraftFolder.REQUIRED:
        raise ConfigError(
            f"draft is not set, but speculation method {config.method} needs one: name the draft's folder."
        )
    drafter = _BUILDERS[config.method](DraftSource(config.draft or config.model, config, target, sampler))
    check_span(drafter, target)
    return drafter
