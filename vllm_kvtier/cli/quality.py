"""``kvtier quality``: the quality loss of each codec for a model, on the user's own text."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_kvtier.cli import inputs
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality import record as records

LENGTHS = "500,1000,2000,3000"

Model = Annotated[str, typer.Option("--model", help="Directory or hub name, as given to vLLM.")]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option("--text", help="Files or directories with text; repeatable. Default: this package's own source."),
]
Codecs = Annotated[str, typer.Option("--codecs", help="Names, separated by commas. Default: all.")]
Windows = Annotated[int, typer.Option("--windows", min=2, help="Number of text windows; more reduce the error.")]
WindowTokens = Annotated[int, typer.Option("--window-tokens", min=16, help="Length of a window.")]
Recall = Annotated[bool, typer.Option("--recall/--no-recall", help="Also ask for codes given earlier in a chat.")]
Questions = Annotated[int, typer.Option("--questions", min=1, help="Number of these questions at each length.")]
Lengths = Annotated[str, typer.Option("--lengths", help="Context lengths of these questions, in tokens.")]
Device = Annotated[str, typer.Option("--device", help="cuda, cpu, ...; auto: CUDA if available.")]
Dtype = Annotated[str, typer.Option("--dtype", help="dtype of the model; auto: its own, float32 on a CPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record instead of a table.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw it as PNG, SVG or PDF.")]
Folder = Annotated[Path | None, typer.Option("--records", help="Directory of records. Default: in the user's cache.")]


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
    """Measure the quality loss of each codec for a model, and write the record that `codec: auto` reads.

    The model runs in transformers; every token's K and V pass through the codec.
    """
    errors = inputs.error_console()
    with inputs.errors_as_messages():
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
    title = (
        f"{record.model}: {record.text.windows} windows of {record.text.window_tokens} tokens of {record.text.name}, "
        f"{record.nats:.3f} nats a token without a codec"
    )
    lost = (f"lost at {tokens:,}" for tokens in asked)
    heads = ("codec", "bits", "smaller", "perplexity", "KL, nats", "same token", *lost, "auto")
    style = {"pad_edge": True, "title": title, "title_justify": "left", "caption_justify": "left"}
    table = inputs.make_table(heads, (), left=("codec", "auto"), **style)
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
            "yes" if codec.name in allowed else f"no: {records.refusal(codec) or 'its format has changed'}",
        )
    if asked:
        table.caption = "lost: answers right without a codec and wrong with it"
    console.print(table)


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
        raise KVTierError(f"--lengths takes numbers separated by commas, not {option!r}") from error
