"""The measured acceptance is what a step-by-step chain of drafts would get."""

import torch
from transformers import LlamaForCausalLM

from cluster.speculation.eagle3_model import Eagle3Head
from cluster.training.capture import CapturedSample, CapturedSamples
from cluster.training.evaluate import measure_acceptance
from cluster.training.head_init import head_config, new_head
from cluster.training.ttt import TttBatch, ttt_steps
from tests.support.plain_attention import WholeSequence
from tests.unit.training.conftest import AUX_LAYERS

DRAFTS = 3


def half_trained(target: LlamaForCausalLM, captured: CapturedSamples) -> Eagle3Head:
    """A head that is right about as often as wrong: a few steps on the very text it is measured on."""
    head = new_head(target, head_config(target, 40, AUX_LAYERS), list(range(40)), seed=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    batch = TttBatch.of([captured[i] for i in range(len(captured))])
    for _ in range(40):
        losses = [
            torch.nn.functional.cross_entropy(head.logits(out[batch.learned]), batch.labels[batch.learned])
            for out in ttt_steps(head, batch, DRAFTS)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return head.requires_grad_(False)


def draft(head: Eagle3Head, sample: CapturedSample, known: int) -> list[int]:
    """A chain after `known` tokens, every pass over the whole context: slow and without any cache."""
    hidden, tokens = head.combine(sample.aux[: known - 1]), sample.tokens[1:known].tolist()
    drafts: list[int] = []
    for _ in range(DRAFTS):
        out = head(torch.tensor(tokens), hidden, torch.arange(len(tokens)), WholeSequence())
        drafts.append(int(head.target_ids[head.logits(out[-1:]).argmax(-1)]))
        hidden, tokens = torch.cat([hidden, out[-1:]]), [*tokens, drafts[-1]]
    return drafts


def test_acceptance_equals_the_step_by_step_chain(target: LlamaForCausalLM, captured: CapturedSamples) -> None:
    head = half_trained(target, captured)
    tokens = steps = 0
    tried, right = [0] * DRAFTS, [0] * DRAFTS
    for i in range(len(captured)):
        sample = captured[i]
        known, end = sample.prompt_tokens + 1, len(sample.tokens)
        while known < end:
            accepted = 0
            for k, token in enumerate(draft(head, sample, known)[: end - known]):
                tried[k] += 1
                if token != int(sample.tokens[known + k]):
                    break
                right[k] += 1
                accepted += 1
            accepted = min(accepted, end - known - 1)
            tokens, steps, known = tokens + accepted + 1, steps + 1, known + accepted + 1
    assert tokens / steps > 1.2, "the head must be right often enough for the comparison to mean something"
    measured = measure_acceptance(head, captured, DRAFTS)
    assert measured.length == tokens / steps
