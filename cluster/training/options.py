"""What `tandem draft train` can be told, and what it answers.

Owns: the options and the result of one training, and the refusal of values that can't work. Read by every module of
`cluster.training`; built by the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigError

ComputeDtype = Literal["auto", "float32", "bfloat16"]

_POSITIVE = (
    "tokens",
    "answers_per_prompt",
    "token_passes",
    "draft_vocab",
    "ttt_steps",
    "batch_tokens",
    "max_len",
    "answer_tokens",
    "held_out_tokens",
    "evaluate_every",
)


@dataclass(frozen=True)
class TrainDraftOptions:
    """One training of an EAGLE3 draft for the model in `model`, written to `out`.

    All that costs time is kept under `work_dir` and is picked up again by the next call with the same options.
    """

    model: Path
    """Folder of the target model (safetensors)."""
    out: Path
    """Folder that receives config.json, model.safetensors and curve.jsonl."""
    data: Path | None = None
    """Ready text to train on instead of generating it: .jsonl (see `cluster.training.samples`) or plain text."""
    prompts: tuple[Path, ...] = ()
    """JSONL files of user prompts for the target to answer, beside those that it invents."""
    answers_per_prompt: int = 1
    """Answers to each given prompt: the first is greedy, further ones are drawn at temperature 0.7."""
    held_out: Path | None = None
    """JSONL file of prompts that are never trained on; acceptance is measured on the target's answers to them."""
    tokens: int = 200_000
    """Answer tokens to generate when there is no `data`."""
    token_passes: int = 1_000_000
    """Tokens to train on in all; more than the data holds means several epochs."""
    work_dir: Path | None = None
    """Corpus, hidden states (4 bytes x hidden size x 2 a token) and checkpoints; default `out`/work."""
    draft_vocab: int = 8192
    """Size of the draft's vocabulary: the most frequent tokens of the training text."""
    aux_layers: tuple[int, ...] | None = None
    """Indices into transformers' hidden_states (0 is the embedding); default the official three."""
    ttt_steps: int = 3
    """Steps of the training-time test: how far the head is trained on its own output."""
    batch_tokens: int = 512
    """Tokens of one optimizer step."""
    max_len: int = 512
    """Longest sequence to train on, in tokens; longer ones are cut."""
    answer_tokens: int = 192
    """Longest answer to generate, in tokens."""
    held_out_tokens: int = 64
    """Longest held-out answer, in tokens."""
    learning_rate: float = 2.5e-3
    """Peak rate of AdamW; warms up over the first 2% of the passes and falls to 2% of it along a cosine."""
    temperature: float = 1.0
    """Temperature of the target's distribution as the soft label."""
    evaluate_every: int = 100_000
    """Token-passes between two held-out measurements (and checkpoints)."""
    compute_dtype: ComputeDtype = "auto"
    """Arithmetic of capture and training; auto measures which of the two is faster here."""
    threads: int | None = None
    """CPU threads; default torch's own choice."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value} but must be at least 1; give a positive number.")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning_rate is {self.learning_rate} but must lie between 0 and 1; try 0.001.")
        if self.batch_tokens < self.max_len:
            raise ConfigError(
                f"batch_tokens is {self.batch_tokens} but must be at least max_len ({self.max_len}); raise it."
            )

    @property
    def work(self) -> Path:
        """The folder of everything that can be resumed."""
        return self.work_dir or self.out / "work"


@dataclass(frozen=True)
class TrainDraftResult:
    """What a training came to. Acceptances are None without held-out prompts."""

    out: Path
    samples: int
    tokens: int
    token_passes: int
    loss: float
    acceptance: float | None
    """Mean acceptance length: tokens a target step, the target's own included, greedy, chain of `ttt_steps` drafts."""
    conditional: tuple[float, ...] | None
    """For each draft step, the share of right drafts among the chains that got so far."""
    vocab_coverage: float
    """Share of the training answers' tokens that the draft vocabulary holds."""
