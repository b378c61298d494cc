"""The sampler draws from the distribution that its parameters describe, and from nothing but its row."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.core.sampling import SamplingParams
from cluster.engine.sampler import Sampler, SampleRow, arrival_times
from cluster.engine.truncation import kept_tokens

DRAWS = 100_000
FEWER = 25_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -2.0, 0.2])
PARAMS = SamplingParams(max_tokens=1)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def draw(params: SamplingParams, draws: int, **history: Any) -> list[int | None]:
    rows = [SampleRow(params, seed=7, position=p, **history) for p in range(draws)]
    return list(Sampler(len(LOGITS)).sample(LOGITS.expand(draws, -1), rows).tokens)


def softmax(logits: torch.Tensor) -> list[float]:
    return torch.softmax(logits.double(), dim=-1).tolist()


def only(ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    masked = torch.full_like(LOGITS, -torch.inf)
    masked[ids] = LOGITS[ids] / temperature
    return masked


def penalised() -> torch.Tensor:
    logits = LOGITS.clone()
    logits[[0, 4]] = torch.tensor([2.0 / 1.3, -0.5 * 1.3])  # in the prompt or generated
    logits[6] *= 1.3
    logits[0] -= 0.4 + 2 * 0.3  # generated twice
    logits[6] -= 0.4 + 0.3
    return logits


# Each case states the expected distribution directly, by listing what survives.
CASES = {
    "plain": (PARAMS, LOGITS, {}),
    "temperature": (replace(PARAMS, temperature=0.7), LOGITS / 0.7, {}),
    "top_k": (replace(PARAMS, top_k=3), only([0, 5, 1]), {}),
    "top_p": (replace(PARAMS, top_p=0.8), only([0, 5, 1, 2]), {}),
    "min_p": (replace(PARAMS, min_p=0.2), only([0, 5, 1, 2]), {}),
    "top_k_and_top_p": (replace(PARAMS, top_k=4, top_p=0.8, temperature=1.5), only([0, 5, 1], 1.5), {}),
    "penalties": (
        replace(PARAMS, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
        penalised(),
        {"prompt": (4,), "output": (0, 6), "drafts": (0,)},
    ),
}


MASK = np.array([i in (1, 2, 3, 6) for i in range(8)])
# Under a mask: the most likely token and others are out, and what is kept is kept among the rest.
MASKED = {
    "mask": (PARAMS, only([1, 2, 3, 6])),
    "mask_and_top_k": (replace(PARAMS, top_k=3), only([1, 2, 3])),
    "mask_and_top_p": (replace(PARAMS, top_p=0.8), only([1, 2, 3])),
    "mask_and_min_p": (replace(PARAMS, min_p=0.5), only([1, 2])),
}


@pytest.mark.parametrize("case", MASKED)
def test_a_mask_comes_before_truncation_and_the_rest_shares_all_probability(case: str) -> None:
    params, expected_logits = MASKED[case]
    counts = np.bincount(np.array(draw(params, FEWER, allowed=MASK)), minlength=len(LOGITS))
    expected = np.array(softmax(expected_logits))
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept] * FEWER).pvalue > 1e-3


def test_masks_and_penalties_compose_and_logprobs_stay_the_models_own() -> None:
    params = replace(GREEDY, presence_penalty=2.0, logprobs=1)
    row = SampleRow(params, 0, 3, output=(1,), allowed=MASK)
    result = Sampler(8).sample(LOGITS.expand(2, -1), [row, replace(row, output=())])
    assert result.tokens == (2, 1)
    assert result.logprobs[0] is not None
    assert result.logprobs[0].logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[2]))
    assert result.logprobs[0].top[0][0] == 0


@pytest.mark.parametrize("params", [GREEDY, PARAMS])
def test_a_row_of_which_no_allowed_token_is_possible_fails_alone(params: SamplingParams) -> None:
    rows = [SampleRow(params, 1, 0, allowed=allowed) for allowed in (np.zeros(8, np.bool_), MASK)]
    tokens = Sampler(8).sample(LOGITS.expand(2, -1), rows).tokens
    assert tokens[0] is None
    assert tokens[1] in (1, 2, 3, 6)


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_processed_distribution(case: str) -> None:
    params, expected_logits, history = CASES[case]
    draws = DRAWS if case in ("plain", "all_at_once") else FEWER
    counts = np.bincount(np.array(draw(params, draws, **history)), minlength=len(LOGITS))
    expected = np.array(softmax(expected_logits))
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept] * draws).pvalue > 1e-3


def test_positions_and_seeds_are_independent() -> None:
    """Neighbouring positions, and equal positions of neighbouring seeds, make independent choices."""
    times = np.stack([arrival_times(seed, position, 64) for seed in range(40) for position in range(40)])
    assert abs(float(times.mean()) - 1) < 0.01
    centred = (times - 1).reshape(40, 40, 64)
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.02
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.02


def test_a_row_is_sampled_alike_in_any_batch() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(replace(PARAMS, top_k=20, top_p=0.9), seed=i, position=5 * i) for i in range(6)]
    together = Sampler(300).sample(logits, rows).tokens
    alone = tuple(Sampler(300).sample(logits[i : i + 1], rows[i : i + 1]).tokens[0] for i in range(6))
    assert together == alone


def test_the_stream_of_a_seed_is_pinned() -> None:
    """A seed gives the same tokens after an upgrade of numpy."""
    assert arrival_times(1234, 17, 3) == pytest.approx([0.9490051, 0.33907637, 0.03179701], rel=1e-5)
    assert np.array_equal(arrival_times(1234, 17, 1000)[:3], arrival_times(1234, 17, 3))
    assert np.array_equal(arrival_times(-1, 0, 3), arrival_times(2**64 - 1, 0, 3))


def test_greedy_takes_the_first_best_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -torch.inf]])
    rows = [SampleRow(GREEDY, 0, 0), SampleRow(GREEDY, 1, 9)]
    assert Sampler(3).sample(logits, rows).tokens == (1, 0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-5])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(replace(PARAMS, temperature=temperature), 50)) == {0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, PARAMS])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float, params: SamplingParams) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    tokens = Sampler(8).sample(logits, [SampleRow(params, 1, p) for p in range(3)]).tokens
    assert tokens[1] is None
    assert tokens[0] is not None and tokens[2] is not None


def test_a_row_without_any_finite_logit_fails() -> None:
    assert Sampler(8).sample(torch.full((1, 8), -torch.inf), [SampleRow(PARAMS, 1, 0)]).tokens == (None,)


@pytest.mark.parametrize("params", [GREEDY, PARAMS, replace(PARAMS, logprobs=3)])
def test_padded_columns_are_never_chosen(params: SamplingParams) -> None:
    logits = torch.cat([LOGITS, torch.full((4,), 50.0)]).expand(200, -1)
    result = Sampler(8).sample(logits, [SampleRow(params, 3, p) for p in range(200)])
    assert all(token is not None and token < 8 for token in result.tokens)
    assert all(token < 8 for entry in result.logprobs if entry for token, _ in entry.top)


def test_min_tokens_bans_end_and_stop_tokens_until_reached() -> None:
    params = replace(GREEDY, min_tokens=3, stop_token_ids=(5,))
    sampler = Sampler(8, eos_ids=(0,))
    early = SampleRow(params, 0, 9, prompt=(1, 1, 1, 1), output=(2,), drafts=(3,))
    due = SampleRow(params, 0, 10, prompt=(1, 1, 1, 1), output=(2,), drafts=(3, 4))
    assert sampler.sample(LOGITS.expand(2, -1), [early, due]).tokens == (1, 0)


def test_a_verification_row_is_penalised_for_the_drafts_before_it() -> None:
    params = replace(GREEDY, presence_penalty=2.0)
    drafted = SampleRow(params, 0, 4, prompt=(3,), output=(5,), drafts=(0, 2))
    decoded = SampleRow(params, 0, 4, prompt=(3,), output=(5, 0, 2))
    assert Sampler(8).sample(LOGITS.expand(2, -1), [drafted, decoded]).tokens == (1, 1)


def test_logprobs_are_the_models_own() -> None:
    """They ignore temperature and penalties, and list the likeliest tokens best first."""
    params = replace(PARAMS, temperature=0.0, presence_penalty=2.0, logprobs=2)
    result = Sampler(8).sample(LOGITS[None], [SampleRow(params, 0, 3, output=(0,))])
    expected = torch.log_softmax(LOGITS, -1)
    entry = result.logprobs[0]
    assert entry is not None and entry.token_id == result.tokens[0] == 5
    assert entry.logprob == pytest.approx(float(expected[5]))
    assert entry.top == ((0, pytest.approx(float(expected[0]))), (5, pytest.approx(float(expected[5]))))


def test_no_logprobs_unless_asked() -> None:
    assert Sampler(8).sample(LOGITS[None], [SampleRow(GREEDY, 0, 0)]).logprobs == (None,)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = LOGITS[None].clone()
    params = replace(PARAMS, repetition_penalty=2.0, min_tokens=5, top_k=3)
    Sampler(8, (0,)).sample(logits, [SampleRow(params, 0, 3, prompt=(0, 1))])
    assert torch.equal(logits[0], LOGITS)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        Sampler(8).sample(LOGITS[None], [])
    with pytest.raises(ValueError, match="at least 9"):
        Sampler(9).sample(LOGITS[None], [SampleRow(GREEDY, 0, 0)])


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p_on_a_large_vocabulary_equals_a_full_sort(top_p: float) -> None:
    """Whether or not the nucleus lies within the head that is looked at first."""
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 3
    probabilities, order = torch.softmax(scores.double(), -1).sort(descending=True)
    inside = probabilities.cumsum(0) - probabilities < top_p
    expected = sorted(order[inside].tolist())
    assert kept_tokens(scores.numpy(), replace(PARAMS, top_p=top_p)).tolist() == expected
