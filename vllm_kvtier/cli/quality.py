"""``kvtier quality``: what a codec costs a model, on the user's own text."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality import record as records

LENGTHS = "500,1000,2000,3000"

Model = Annotated[str, typer.Option("--model", help="Directory or hub name, as given to vLLM.")]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option("--text", help="Files or directories to read, repeatable; without: this package's own source."),
]
Codecs = Annotated[str, typer.Option("--codecs", help="Names with commas between; without: all.")]
Windows = Annotated[int, typer.Option("--windows", min=2, help="Pieces of text; more make smaller errors.")]
WindowTokens = Annotated[int, typer.Option("--window-tokens", min=16, help="Length of a piece.")]
Recall = Annotated[bool, typer.Option("--recall/--no-recall", help="Ask for codes told earlier in a chat.")]
Questions = Annotated[int, typer.Option("--questions", min=1, help="Of those, at each length.")]
Lengths = Annotated[str, typer.Option("--lengths", help="Tokens of context of those questions.")]
Device = Annotated[str, typer.Option("--device", help="cuda, cpu, ...; auto: CUDA if there is any.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the model's arithmetic; auto: its own, float32 on a CPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="The record instead of a table.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw it, as PNG, SVG or PDF.")]
Folder = Annotated[Path | None, typer.Option("--records", help="Where records lie, instead of the user's cache.")]


def quality(
    model: Model,
    text: TextFiles = None,
    codecs: Codecs = "",
    windows: Windows = 32,
    window_tokens: WindowTokens = 1024,
    recall: Recall = True,
    questions: Questions = 50,
    lengths: Lengths = LENGTHS,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    plot: PlotFile = None,
    folder: Folder = None,
) -> None:
    """Measure what each codec costs a model, and write the record that `codec: auto` reads.

    The model runs in transformers, every token's K and V having passed through the codec.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        measured = _measure(
            errors,
            model=model,
            text=text or [],
            codecs=_names(codecs),
            windows=windows,
            window_tokens=window_tokens,
            recall=recall,
            questions=questions,
            lengths=_numbers(lengths),
            device=device,
            dtype=dtype,
        )
        file = records.save(measured.record, folder)
        whole = records.load(measured.record.fingerprint, folder) or measured.record
        if plot:
            from vllm_kvtier.quality.plot import plot as draw

            draw([whole], plot)
    except KVTierError as error:
        errors.print(f"error: {error}", markup=False)
        raise typer.Exit(1) from error
    for remark in measured.remarks:
        errors.print(remark, markup=False)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
    else:
        show(whole, Console())
    errors.print(f"record: {file}", markup=False)


def show(record: records.Record, console: Console) -> None:
    """The table."""
    allowed = records.admitted(record)
    asked = sorted({each.tokens for codec in record.codecs for each in codec.recall})
    table = Table(box=None, title_justify="left", caption_justify="left")
    table.title = (
        f"{record.model}: {record.text.windows} windows of {record.text.window_tokens} tokens of {record.text.name}, "
        f"{record.nats:.3f} nats a token without a codec"
    )
    for name in ("codec", "bits", "smaller", "perplexity", "KL, nats", "same token"):
        table.add_column(name, justify="left" if name == "codec" else "right")
    for tokens in asked:
        table.add_column(f"lost at {tokens:,}", justify="right")
    table.add_column("auto")
    for codec in sorted(record.codecs, key=lambda codec: -codec.bits):
        at = {each.tokens: f"{each.lost} of {each.raw_right}" for each in codec.recall}
        table.add_row(
            codec.name,
            f"{codec.bits:.2f}",
            f"{16 / codec.bits:.2f} x",
            f"{codec.perplexity:+.2%} ± {codec.perplexity_error:.2%}",
            f"{codec.divergence:.5f}",
            f"{codec.agreement:.1%}",
            *(at.get(tokens, "") for tokens in asked),
            "yes" if codec.name in allowed else f"no: {records.refusal(codec) or 'its format is another by now'}",
        )
    if asked:
        table.caption = "lost: answers right without a codec and wrong with it"
    console.print(table)


def add_to(app: typer.Typer) -> None:
    app.command("quality")(quality)


def _measure(errors: Console, **options):
    try:
        from vllm_kvtier.quality.measure import Options, measure
    except ModuleNotFoundError as error:
        raise KVTierError(f"measuring needs {error.name}, which vLLM brings: pip install transformers torch") from error
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(*columns, TimeRemainingColumn(), console=errors, disable=not sys.stderr.isatty()) as bars:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done)

        return measure(Options(**options), progress)


def _names(option: str) -> list[str]:
    return [name.strip() for name in option.split(",") if name.strip()]


def _numbers(option: str) -> list[int]:
    try:
        return sorted({int(number) for number in _names(option)})
    except ValueError as error:
        raise KVTierError(f"--lengths takes numbers with commas between, not {option!r}") from error
