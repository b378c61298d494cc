"""The span table: on which tokens a method's draft KV depends, and what follows from that for reuse.

Draft KV in slot i is a function of tokens 0..i+span. Invariant: this table is the only place that states a span; the
keys of the draft pool, eligibility for joint reuse and the coupling of the pools are derived from it. A span is
measured at start-up too (`span_check`). Called by the factory, the engine and the tests.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from cluster.core.handle import Coupling


class SpeculationMethod(StrEnum):
    """How drafts are made."""

    NONE = "none"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    PARD = "pard"
    DFLASH = "dflash"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    PEAGLE = "peagle"
    MTP_EAGLE = "mtp_eagle"
    MTP = "mtp"
    MEDUSA = "medusa"


class DraftFolder(Enum):
    """Whether a method takes the folder of a draft. Where it is optional, the target's own folder holds a draft too."""

    NEVER = auto()
    OPTIONAL = auto()
    REQUIRED = auto()


class _PerLayer(Enum):
    """A span that is the number of the draft's layers, since layer k looks one token further ahead than layer k-1."""

    SPAN = auto()


@dataclass(frozen=True, slots=True)
class _Row:
    """`span` is None if the method has no draft KV, or if its span isn't established: never guess 0. `trees`: whether
    its draft is heads over the target's states, from which trees can grow."""

    has_draft_kv: bool
    span: int | _PerLayer | None
    reads_target_hidden: bool
    folder: DraftFolder
    trees: bool = False


_TABLE = {
    SpeculationMethod.NONE: _Row(False, None, False, DraftFolder.NEVER),
    SpeculationMethod.NGRAM: _Row(False, None, False, DraftFolder.NEVER),
    SpeculationMethod.SUFFIX: _Row(False, None, False, DraftFolder.NEVER),
    # Unshifted input: slot i holds token i.
    SpeculationMethod.DRAFT_MODEL: _Row(True, 0, False, DraftFolder.REQUIRED),
    SpeculationMethod.PARD: _Row(True, 0, False, DraftFolder.REQUIRED),
    # Slot i holds what the draft's layers make of target hidden state i.
    SpeculationMethod.DFLASH: _Row(True, 0, True, DraftFolder.REQUIRED),
    # Pair slots: slot i holds (target hidden state i, token i+1).
    SpeculationMethod.EAGLE: _Row(True, 1, True, DraftFolder.REQUIRED, trees=True),
    SpeculationMethod.EAGLE3: _Row(True, 1, True, DraftFolder.REQUIRED, trees=True),
    SpeculationMethod.PEAGLE: _Row(True, 1, True, DraftFolder.REQUIRED),
    SpeculationMethod.MTP_EAGLE: _Row(True, 1, True, DraftFolder.OPTIONAL, trees=True),
    # Layer k of a slot looks one token further ahead than layer k-1.
    SpeculationMethod.MTP: _Row(True, _PerLayer.SPAN, True, DraftFolder.OPTIONAL),
    SpeculationMethod.MEDUSA: _Row(False, None, True, DraftFolder.REQUIRED, trees=True),
}


def draft_kv_lookahead(method: SpeculationMethod, layers: int | None = None) -> int | None:
    """The span of the method's draft KV in tokens; None keeps the method off joint reuse.

    `layers` of the draft must be given for a method whose span grows with them; otherwise its span isn't established.
    """
    span = _TABLE[method].span
    return layers if isinstance(span, _PerLayer) else span


def draft_folder(method: SpeculationMethod) -> DraftFolder:
    """Whether the method takes the folder of a draft."""
    return _TABLE[method].folder


def drafts_trees(method: SpeculationMethod) -> bool:
    """Whether the method can draft trees as well as chains."""
    return _TABLE[method].trees


def has_draft_kv(method: SpeculationMethod) -> bool:
    """Whether the method writes draft KV, and so needs a draft pool."""
    return _TABLE[method].has_draft_kv


def joint_reuse_eligible(method: SpeculationMethod, layers: int | None = None) -> bool:
    """Whether the draft's KV may be reused along with the target's: there are two pools and the span is known."""
    return has_draft_kv(method) and draft_kv_lookahead(method, layers) is not None


def coupling_of(method: SpeculationMethod) -> Coupling:
    """How the two pools' cursors are tied: a draft that reads hidden states must go where the target goes."""
    if not has_draft_kv(method):
        return Coupling.NONE
    return Coupling.JOINT if _TABLE[method].reads_target_hidden else Coupling.INDEPENDENT
