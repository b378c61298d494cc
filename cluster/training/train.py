"""One training of an EAGLE3 draft, from text to the exported folder.

Owns: the order of the stages (text, held-out answers, hidden states, training, export) and what each hands to the
next. Every stage keeps its result in the work folder and is skipped when it is there, so an interrupted training is
continued by the same command. Called by `tandem draft train` and by the script that makes the tests' tiny draft.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ConfigError, ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.training.capture import CapturedSamples, capture
from cluster.training.checkpoint import TrainingState
from cluster.training.corpus import answer_prompts, build_corpus
from cluster.training.evaluate import Acceptance
from cluster.training.export import export_head
from cluster.training.hardware import compute_dtype
from cluster.training.head_init import choose_vocabulary, head_config, new_head
from cluster.training.options import TrainDraftOptions, TrainDraftResult
from cluster.training.samples import Sample, chat_ids, read_prompts, read_samples
from cluster.training.trainer import Trainer


def train_draft(options: TrainDraftOptions) -> TrainDraftResult:
    """Trains a draft as `options` say and writes it to `options.out`; goes on where an earlier call stopped.

    Raises `ConfigError` for options that don't fit the model or the data, `ModelLoadError` for a model that can't be
    loaded.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    with _Stages() as stage:
        samples, held_out = _texts(options, stage)
        target = _load_target(options)
        config = head_config(target, options.draft_vocab, options.aux_layers)
        data = capture(target, samples, config.aux_layer_ids, options.work / "states", stage("states", len(samples)))
        held = capture(target, held_out, config.aux_layer_ids, options.work / "held-out") if held_out else None
        vocabulary, coverage = choose_vocabulary(samples, config.draft_vocab_size, config.vocab_size)
        head = new_head(target, config, vocabulary, options.seed)
        trainer = Trainer(head, data, held, BorrowedWeights.of(target).output, options, target.dtype)
        state, acceptance = trainer.run(_reporter(stage("training", options.token_passes), stage))
    export_head(head, options.out, target.config, options.ttt_steps, torch.bfloat16)
    if held is not None:
        shutil.copyfile(options.work / "curve.jsonl", options.out / "curve.jsonl")
    return _result(options, data, state, acceptance, coverage)


def _texts(options: TrainDraftOptions, stage: _Stages) -> tuple[list[Sample], list[Sample]]:
    tokenizer = Tokenizer.load(options.model)
    held_prompts = read_prompts(options.held_out) if options.held_out else []
    if options.data is not None:
        samples = read_samples(options.data, tokenizer)
    else:
        samples = build_corpus(options, tokenizer, held_prompts, stage("text", options.tokens))
    opened = {tuple(chat_ids(tokenizer, prompt)) for prompt in held_prompts}
    kept = [
        cut
        for sample in samples
        if sample.tokens[: sample.prompt_tokens] not in opened and (cut := sample.cut(options.max_len)) is not None
    ]
    if not kept:
        raise ConfigError(f"data holds no sample of 3 to {options.max_len} tokens to train on; give more text.")
    return kept, _held_out(options, tokenizer, held_prompts, stage)


def _held_out(options: TrainDraftOptions, tokenizer: Tokenizer, prompts: Sequence[str], stage: _Stages) -> list[Sample]:
    if not prompts:
        return []
    path = options.work / "held-out.jsonl"
    answers = answer_prompts(options, tokenizer, prompts, path, stage("held-out answers", len(prompts)))
    # An answer of one token comes whole out of the prefill: there is nothing to draft in it.
    return [sample for sample in answers if len(sample.tokens) > sample.prompt_tokens + 1]


def _load_target(options: TrainDraftOptions) -> PreTrainedModel:
    dtype = compute_dtype(options.compute_dtype)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"model {options.model} can't be loaded ({error}); give a folder of safetensors."
        ) from error
    model.train(False)
    model.requires_grad_(False)
    return model


class _Stages:
    """Progress bars on the terminal: `stages(name, total)` begins one and returns the function that moves it."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns)

    def __enter__(self) -> _Stages:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, name: str, total: int) -> Callable[[int], None]:
        task = self._bars.add_task(name, total=total)
        return lambda done: self._bars.update(task, completed=done)

    def say(self, line: str) -> None:
        """A line that stays above the bars."""
        self._bars.console.print(line, highlight=False)


def _reporter(advance: Callable[[int], None], stages: _Stages) -> Callable[[TrainingState, Acceptance | None], None]:
    def report(state: TrainingState, acceptance: Acceptance | None) -> None:
        advance(state.passes)
        if acceptance is not None:
            shares = " ".join(f"{share:.2f}" for share in acceptance.conditional)
            stages.say(
                f"{state.passes} tokens: loss {state.loss:.3f}, held-out {acceptance.length:.3f} tokens/step ({shares})"
            )

    return report


def _result(
    options: TrainDraftOptions,
    data: CapturedSamples,
    state: TrainingState,
    acceptance: Acceptance | None,
    coverage: float,
) -> TrainDraftResult:
    return TrainDraftResult(
        out=options.out,
        samples=len(data),
        tokens=sum(data.lengths),
        token_passes=state.passes,
        loss=state.loss or 0.0,
        acceptance=acceptance.length if acceptance else None,
        conditional=acceptance.conditional if acceptance else None,
        vocab_coverage=coverage,
    )
