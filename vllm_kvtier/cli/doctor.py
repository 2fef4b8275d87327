"""``kvtier doctor``: what is wrong with this machine, these engines or this prompt, and what to do about it."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from vllm_kvtier.cli import inputs
from vllm_kvtier.doctor.examine import Options, examine
from vllm_kvtier.doctor.report import Check, exit_code
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.launch import store_path

_MARKS = {
    "ok": ("ok     ", "green"),
    "warn": ("warn   ", "yellow"),
    "fail": ("FAIL   ", "bold red"),
    "unknown": ("?      ", "cyan"),
}

Servers = Annotated[list[str] | None, typer.Option("--server", help="A vLLM server, http://HOST:PORT; repeatable.")]
Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint", help="HOST:PORT of an engine's connector ('answers on' in its log), in --server's order."
    ),
]
Socket = Annotated[str | None, typer.Option("--socket", help="The node store's socket; without: this user's own.")]
Disk = Annotated[Path | None, typer.Option("--disk", help="Directory that a disk tier uses or is to use.")]
DiskSize = Annotated[str, typer.Option("--disk-size", help="As store_disk_size.")]
StoreSize = Annotated[str, typer.Option("--store-size", help="As store_size: does it fit? 'off': no store is wanted.")]
Listen = Annotated[list[str] | None, typer.Option("--listen", help="HOST:PORT that is to be listened on: is it free?")]
Backends = Annotated[list[str] | None, typer.Option("--nixl-backend", help="As nixl_backends; repeatable.")]
LikePrompt = Annotated[
    Path | None,
    typer.Option("--like", help="A prompt (as --prompt or --messages) expected to share its beginning.", exists=True),
]
Salts = Annotated[
    list[str] | None,
    typer.Option("--cache-salt", help="The prompt's cache_salt; again: others that it may have been sent with."),
]
Adapter = Annotated[str, typer.Option("--adapter", help="Name of the LoRA adapter that the prompt is for.")]
Threshold = Annotated[int, typer.Option("--pull-threshold", min=0, help="As the engines' option.")]
NotHere = Annotated[bool, typer.Option("--remote", help="Leave this machine out: the engines are elsewhere.")]
AsJson = Annotated[bool, typer.Option("--json", help="A list of checks instead of lines.")]


def doctor(
    server: Servers = None,
    endpoint: Endpoints = None,
    socket: Socket = None,
    disk: Disk = None,
    disk_size: DiskSize = "64GiB",
    store_size: StoreSize = "10%",
    listen: Listen = None,
    cluster_key: inputs.Key = None,
    nixl_backend: Backends = None,
    prompt: inputs.PromptFile = None,
    messages: inputs.MessagesFile = None,
    like: LikePrompt = None,
    cache_salt: Salts = None,
    adapter: Adapter = "",
    pull_threshold: Threshold = 64,
    remote: NotHere = False,
    as_json: AsJson = False,
) -> None:
    """Find out what is wrong, and what to do: this machine, engines, the node store, or why a prompt missed.

    Only looks. Exit status: 0 all well, 1 something to look at, 2 something is broken.
    """
    console = Console(soft_wrap=True, highlight=False)
    with inputs.errors_in_words(code=2):
        asked = inputs.read_prompt(prompt, messages)
        other = inputs.read_file(like, messages is not None) if like else None
        if other is not None and asked is None:
            raise typer.BadParameter("needs --prompt or --messages to compare with", param_hint="--like")
        if remote and not any((server, endpoint, socket, disk, listen, cluster_key, asked)):
            raise typer.BadParameter(
                "leaves nothing to look at: give --server, --endpoint or --socket", param_hint="--remote"
            )
        options = Options(
            servers=tuple(server or ()),
            endpoints=tuple(endpoint or ()),
            socket=socket or ("" if remote else _own_socket()),
            socket_given=socket is not None,
            disk=disk,
            disk_size=disk_size,
            store_size=store_size,
            listen=tuple(listen or ()),
            cluster_key=cluster_key,
            backends=tuple(nixl_backend or ("UCX",)),
            prompt=asked,
            like=other,
            salts=tuple(cache_salt or ("",)),
            adapter=adapter,
            threshold=pull_threshold,
            here=not remote,
        )
        checks = examine(options, (lambda check: None) if as_json else lambda check: show(check, console))
    if as_json:
        print(json.dumps(msgspec.to_builtins(checks), indent=1))
    else:
        _sum_up(checks, console)
    raise typer.Exit(exit_code(checks))


def _own_socket() -> str:
    try:
        return store_path()
    except KVTierError as error:
        raise KVTierError(f"the node store's place cannot be used: {error}") from error


def show(check: Check, console: Console) -> None:
    mark, style = _MARKS[check.state]
    console.print(Text.assemble((mark, style), (check.name, "bold"), ": ", check.sentence))
    if check.remedy and check.state != "ok":
        console.print(Text.assemble(" " * len(mark), "-> ", check.remedy), style="dim")


def _sum_up(checks: list[Check], console: Console) -> None:
    count = {state: sum(check.state == state for check in checks) for state in _MARKS}
    if count["fail"] or count["warn"]:
        console.print(f"\n{count['fail']} broken, {count['warn']} to look at, {count['ok']} fine", markup=False)
    else:
        console.print(f"\nAll {count['ok']} checks are fine.", markup=False)


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
