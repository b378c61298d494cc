"""`tandem draft train`: an EAGLE3 draft for a model of the user's, trained on the model's own outputs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.errors import ConfigError, show
from cluster.training.options import TrainDraftOptions, TrainDraftResult

draft = typer.Typer(help="Make drafts.", no_args_is_help=True)


@draft.callback()
def _group() -> None:
    """Keeps `train` a subcommand though it is the only one."""


@draft.command()
def train(
    model: Annotated[Path, typer.Argument(help="Folder of the target model (safetensors).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the finished draft.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to train on instead of generating it: .jsonl or plain text."),
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="JSONL of prompts for the target to answer; repeatable.")
    ] = None,
    answers_per_prompt: Annotated[
        int, typer.Option(metavar="N", help="Answers to each given prompt.")
    ] = TrainDraftOptions.answers_per_prompt,
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of prompts that only measure the draft.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Answer tokens to generate without --data.")
    ] = TrainDraftOptions.tokens,
    token_passes: Annotated[
        int, typer.Option(metavar="N", help="Tokens to train on in all.")
    ] = TrainDraftOptions.token_passes,
    work_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of what can be resumed. Default: OUT/work.")
    ] = None,
    draft_vocab: Annotated[
        int, typer.Option(metavar="N", help="Size of the draft's vocabulary.")
    ] = TrainDraftOptions.draft_vocab,
    aux_layers: Annotated[
        str | None, typer.Option(metavar="I,J,K", help="Hidden states that the draft reads. Default: EAGLE3's three.")
    ] = None,
    ttt_steps: Annotated[
        int, typer.Option(metavar="N", help="Steps that it is trained on its own output.")
    ] = TrainDraftOptions.ttt_steps,
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of one optimizer step.")
    ] = TrainDraftOptions.batch_tokens,
    max_len: Annotated[
        int, typer.Option(metavar="N", help="Longest sequence to train on.")
    ] = TrainDraftOptions.max_len,
    answer_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest answer to generate.")
    ] = TrainDraftOptions.answer_tokens,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", help="Peak learning rate.")
    ] = TrainDraftOptions.learning_rate,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Temperature of the soft labels.")
    ] = TrainDraftOptions.temperature,
    evaluate_every: Annotated[
        int, typer.Option(metavar="N", help="Tokens between checkpoints.")
    ] = TrainDraftOptions.evaluate_every,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of generation and training.")] = TrainDraftOptions.seed,
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
