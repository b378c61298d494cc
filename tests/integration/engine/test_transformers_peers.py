"""transformers' own speculative decoding on the same models: the same drafts and the same answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from cluster.core.sampling import SamplingParams
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.ngram import NgramDrafter
from cluster.speculation.protocol import DraftTask
from tests.fixtures.prompts import TINY_DRAFT, repeat_prompts
from tests.integration.engine.support import (
    eight_prompts,
    encode,
    greedy,
    make_engine,
    reference,
    reference_model,
    run_all,
)
from tests.unit.speculation.drafting import Sequenced, new_drafter, scattered_blocks

MAX_TOKENS = 24
K = 3
LONGEST = 3


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Some that ask to be repeated, where prompt lookup finds much."""
    return (*eight_prompts()[::2], *(encode(prompt.text) for prompt in repeat_prompts(3, seed=12)))


@cache
def assistant() -> PreTrainedModel:
    """The draft, guessing K tokens whatever came of the last ones."""
    model = AutoModelForCausalLM.from_pretrained(TINY_DRAFT, dtype=torch.float32, local_files_only=True).eval()
    config: Any = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0
    config.eos_token_id = None
    return model


@dataclass(frozen=True)
class Asked:
    """One request for candidates inside of `generate`: the tokens known then, and the candidates."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


def generate(
    monkeypatch: pytest.MonkeyPatch, generator: type[CandidateGenerator], prompt: Sequence[int], **options: object
) -> tuple[tuple[int, ...], list[Asked]]:
    """The output of transformers with drafts, and what its `generator` was asked for on the way."""
    asked: list[Asked] = []
    original = generator.get_candidates

    def listening(self: CandidateGenerator, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        candidates, scores = original(self, input_ids, **kwargs)
        tokens = tuple(input_ids[0].tolist())
        asked.append(Asked(tokens, tuple(candidates[0, len(tokens) :].tolist())))
        return candidates, scores

    ids = torch.tensor([prompt])
    with monkeypatch.context() as patch:
        patch.setattr(generator, "get_candidates", listening)
        output = reference_model().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return tuple(output[0, len(prompt) :].tolist()), asked


@pytest.fixture
def assisted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], tuple[tuple[int, ...], list[Asked]]]:
    return lambda prompt: generate(monkeypatch, AssistedCandidateGenerator, prompt, assistant_model=assistant())


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], tuple[tuple[int, ...], list[Asked]]]:
    options = {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": LONGEST}
    return lambda prompt: generate(monkeypatch, PromptLookupCandidateGenerator, prompt, **options)


Decode = Callable[[Sequence[int]], tuple[tuple[int, ...], list[Asked]]]


@pytest.mark.parametrize(("method", "fixture"), [("draft_model", "assisted"), ("ngram", "looked_up")])
def test_answers_are_those_of_transformers_with_and_without_drafts(
    method: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    decode: Decode = request.getfixturevalue(fixture)
    engine = make_engine(method, chunk=32)
    events = run_all(engine, prompts(), greedy(MAX_TOKENS, ignore_eos=True))
    for event, prompt in zip(events, prompts(), strict=True):
        theirs, _ = decode(prompt)
        assert event.token_ids == theirs == reference(prompt, MAX_TOKENS).tokens
    assert engine.stats().accepted > 0


def test_a_draft_model_drafts_what_the_assistant_drafts(assisted: Decode) -> None:
    """At every place where transformers asked for candidates; near the end it asks for fewer."""
    compared = 0
    for prompt in prompts():
        for asked in assisted(prompt)[1]:
            sequence = Sequenced(
                new_drafter(SpeculationMethod.DRAFT_MODEL), list(asked.tokens), scattered_blocks(0, 40)
            )
            assert sequence.propose(K)[: len(asked.drafts)] == asked.drafts
            compared += len(asked.drafts)
    assert compared > 100


def test_prompt_lookup_finds_the_same_suffix_and_follows_its_last_occurrence(looked_up: Decode) -> None:
    """transformers takes the first occurrence of the longest repeated suffix, Tandem the last one, whose context is the
    nearer; where there is one only, the drafts are the same."""
    same = later = 0
    for prompt in prompts():
        for asked in looked_up(prompt)[1]:
            if len(asked.tokens) + 1 == len(prompt) + MAX_TOKENS:  # the last token, for which it drafts nothing
                continue
            task = DraftTask("r", asked.tokens, 0, 0, K, SamplingParams(max_tokens=8), 0, len(prompt))
            ours = NgramDrafter(K, 1, LONGEST).propose([task])[0].tokens
            longest, places = repeated_suffix(asked.tokens)
            assert (longest > 0) == bool(ours) == bool(asked.drafts)
            if len(places) == 1:
                assert ours[: len(asked.drafts)] == asked.drafts
                same += 1
            elif places:
                assert asked.drafts == asked.tokens[places[0] :][: len(asked.drafts)]
                assert ours == asked.tokens[places[-1] :][:K]
                later += 1
    assert same > 10 and later > 10


def repeated_suffix(tokens: Sequence[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurs before, and where each of its occurrences ends; 0 if none does."""
    for length in range(LONGEST, 0, -1):
        ends = [
            end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[len(tokens) - length :]
        ]
        if ends:
            return length, ends
    return 0, []
