"""`tandem draft train`: an EAGLE3 draft for a model of the user's, trained on the model's own outputs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.errors import ConfigError, show
from cluster.training.options import TrainDraftOptions, TrainDraftResult

_Default = TrainDraftOptions  # its fields' defaults are the flags'
draft = typer.Typer(help="Make drafts.", no_args_is_help=True)


@draft.callback()
def _group() -> None:
    """Keeps `train` a subcommand though it is the only one."""


def _option(help_text: str, metavar: str = "N") -> Any:
    return typer.Option(metavar=metavar, help=help_text)


@draft.command()
def train(
    model: Annotated[Path, typer.Argument(help="Folder of the target model (safetensors).")],
    out: Annotated[Path, _option("Folder for the finished draft.", "DIR")],
    data: Annotated[Path | None, _option("Text to train on, not to be generated: .jsonl or plain.", "FILE")] = None,
    prompts: Annotated[list[Path] | None, _option("JSONL of prompts to answer; repeatable.", "FILE")] = None,
    answers_per_prompt: Annotated[int, _option("Answers to each given prompt.")] = _Default.answers_per_prompt,
    held_out: Annotated[Path | None, _option("JSONL of prompts that only measure the draft.", "FILE")] = None,
    tokens: Annotated[int, _option("Answer tokens to generate without --data.")] = _Default.tokens,
    token_passes: Annotated[int, _option("Tokens to train on in all.")] = _Default.token_passes,
    work_dir: Annotated[Path | None, _option("Folder of what can be resumed. Default: OUT/work.", "DIR")] = None,
    draft_vocab: Annotated[int, _option("Size of the draft's vocabulary.")] = _Default.draft_vocab,
    aux_layers: Annotated[str | None, _option("Hidden states to read. Default: EAGLE3's three.", "I,J,K")] = None,
    ttt_steps: Annotated[int, _option("Steps that it is trained on its own output.")] = _Default.ttt_steps,
    batch_tokens: Annotated[int, _option("Tokens of one optimizer step.")] = _Default.batch_tokens,
    max_len: Annotated[int, _option("Longest sequence to train on.")] = _Default.max_len,
    answer_tokens: Annotated[int, _option("Longest answer to generate.")] = _Default.answer_tokens,
    learning_rate: Annotated[float, _option("Peak learning rate.", "R")] = _Default.learning_rate,
    temperature: Annotated[float, _option("Temperature of the soft labels.", "T")] = _Default.temperature,
    evaluate_every: Annotated[int, _option("Tokens between checkpoints.")] = _Default.evaluate_every,
    threads: Annotated[int | None, _option("CPU threads.")] = None,
    seed: Annotated[int, _option("Seed of generation and training.")] = _Default.seed,
) -> None:
    """Train an EAGLE3 draft for a model; the same command again goes on where it stopped."""
    from cluster.training.train import train_draft

    options = TrainDraftOptions(
        model=model,
        out=out,
        data=data,
        prompts=tuple(prompts or ()),
        answers_per_prompt=answers_per_prompt,
        held_out=held_out,
        tokens=tokens,
        token_passes=token_passes,
        work_dir=work_dir,
        draft_vocab=draft_vocab,
        aux_layers=_layers(aux_layers),
        ttt_steps=ttt_steps,
        batch_tokens=batch_tokens,
        max_len=max_len,
        answer_tokens=answer_tokens,
        learning_rate=learning_rate,
        temperature=temperature,
        evaluate_every=evaluate_every,
        threads=threads,
        seed=seed,
    )
    Console(highlight=False).print(_summary(train_draft(options)), markup=False, soft_wrap=True)


def _summary(result: TrainDraftResult) -> str:
    measured = "not measured (no --held-out)" if result.acceptance is None else f"{result.acceptance:.3f} tokens a step"
    return (
        f"{result.out}: {result.token_passes:,} tokens of training on {result.tokens:,}, loss {result.loss:.3f}, "
        f"held-out acceptance {measured}, draft vocabulary covers {result.vocab_coverage:.1%}"
    )


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"aux_layers is {show(text)}, but must be whole numbers with commas between: give some such as 3,16,28."
        ) from None
