"""Drafts by suffix decoding: what followed repeated suffixes, here and in past outputs (Oliaro et al. 2024).

Each request is searched in its own text, prompt and output, and in the outputs of past requests of the same tenant;
the guess that is expected to get more tokens right is taken. How much is drafted follows from how long the match is and
how often it went on in this way. Invariant: a request's own text is all of its tokens, reused ones included, however
they were computed. No model, no KV. The options are those of Snowflake's implementation and of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.source import DraftSource
from cluster.speculation.suffix_memory import PastOutputs
from cluster.speculation.suffix_search import SuffixRule, TokenStream


@dataclass(slots=True)
class _Text:
    """A request's own text, and the tenant that may find it later, if any. `known` is the engine's sequence of its
    tokens, which grows: at the end of the request it holds those of the last step too, after which no drafts were asked
    for."""

    tenant: bytes | None
    num_prompt: int
    known: Sequence[int]
    stream: TokenStream = field(default_factory=TokenStream)

    def catch_up(self, tokens: Sequence[int]) -> None:
        self.known = tokens
        self.stream.extend(tokens[self.stream.end :])

    def output(self, depth: int) -> Sequence[int]:
        """The output, after as much of the prompt's end as could be matched; nothing if there is no output."""
        start = max(0, self.num_prompt - depth)
        return self.known[start:] if len(self.known) > self.num_prompt else ()


def build_suffix(source: DraftSource) -> SuffixDrafter:
    """A drafter by suffix decoding, as configured."""
    config = source.config
    rule = SuffixRule(config.suffix_max_tree_depth, config.suffix_max_spec_factor, config.suffix_min_token_prob)
    return SuffixDrafter(source.max_drafts, rule, config.suffix_max_cached_requests)


class SuffixDrafter:
    """`max_drafts` is K; `cached_requests` outputs of past requests are searched too."""

    method = SpeculationMethod.SUFFIX
    kv_layout: KvLayout | None = None
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, max_drafts: int, rule: SuffixRule, cached_requests: int) -> None:
        self.shape = DraftShape(coupling_of(self.method), draft_kv_lookahead(self.method), max_drafts)
        self._rule = rule
        self._past = PastOutputs(cached_requests)
        self._texts: dict[str, _Text] = {}

    def attach(self, kv: KvTensors) -> None:
        raise TypeError("suffix decoding has no KV")

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        return [self._look_up(task) if task.k > 0 else NO_DRAFTS for task in tasks]

    def _look_up(self, task: DraftTask) -> Drafts:
        text = self._texts.get(task.request_id)
        if text is None:
            text = self._texts[task.request_id] = _Text(task.tenant, task.num_prompt, task.tokens)
            if task.tenant is not None:
                self._past.withdraw(task.tenant, task.request_id, text.output(self._rule.depth))
        text.catch_up(task.tokens)
        context = task.tokens[-self._rule.depth :]
        guess = self._rule.guess(text.stream.tokens, context, task.k)
        past = None if task.tenant is None else self._past.tokens(task.tenant)
        if past is not None:
            other = self._rule.guess(past, context, task.k)
            guess = other if other.score > guess.score else guess
        return Drafts.chain(guess.tokens)

    def forget(self, request_id: str) -> None:
        """Move the output of a request to the past ones; it is taken out again if the request goes on."""
        text = self._texts.pop(request_id, None)
        if text is None or text.tenant is None:
            return
        output = text.output(self._rule.depth)
        if output:
            self._past.add(text.tenant, request_id, output)

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        return []
