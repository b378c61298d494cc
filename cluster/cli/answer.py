"""One answer of a cluster, with the figures that users look at.

Invariant: all times are the gateway's, taken with one clock. Used by `generate`, `chat` and `demo`, whose `--json`
writes these fields.
"""

from dataclasses import dataclass
from typing import Self

from cluster.rpc._generated.tandem.v1 import tandem_pb2 as pb


@dataclass(frozen=True, slots=True)
class Answer:
    """Token counts are of the prompt; `reused_draft` is 0 without a draft pool.

    `acceptance` is the mean number of tokens that a speculative step gained, None if there was no such step;
    `tokens_per_s` counts the tokens after the first.
    """

    worker: str
    prompt_tokens: int
    reused_target: int
    reused_draft: int
    reused_joint: int
    acceptance: float | None
    ttft_s: float
    tokens_per_s: float
    text: str

    @classmethod
    def of(cls, text: str, completion: pb.Completion) -> Self:
        """The answer `text`, which ended with `completion`."""
        reuse, speculation, timings = completion.reuse, completion.speculation, completion.timings
        after_first_s = timings.total_s - timings.time_to_first_token_s
        return cls(
            worker=completion.worker_id,
            prompt_tokens=completion.usage.prompt_tokens,
            reused_target=reuse.target_tokens,
            reused_draft=reuse.draft_tokens,
            reused_joint=reuse.joint_tokens,
            acceptance=speculation.mean_acceptance_length if speculation.HasField("mean_acceptance_length") else None,
            ttft_s=timings.time_to_first_token_s,
            tokens_per_s=(completion.usage.completion_tokens - 1) / after_first_s if after_first_s > 0 else 0.0,
            text=text,
        )
