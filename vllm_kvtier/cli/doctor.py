"""``kvtier doctor``: problems of this machine, of engines, of the node store or of a prompt, and how to fix them."""

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
from vllm_kvtier.store.launcher import store_path, store_paths

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
Socket = Annotated[str | None, typer.Option("--socket", help="The node store's socket; default: this user's store.")]
Disk = Annotated[Path | None, typer.Option("--disk", help="Directory of a disk tier, existing or planned.")]
DiskSize = Annotated[str, typer.Option("--disk-size", help="As store_disk_size.")]
ObjectUrl = Annotated[
    str, typer.Option("--object-url", help="As store_object_url: writes, reads and deletes an object.")
]
MooncakeMaster = Annotated[
    str,
    typer.Option("--mooncake-master", help="As store_mooncake_master: writes, reads and removes an object of 1 MiB."),
]
MooncakeMetrics = Annotated[
    int, typer.Option("--mooncake-metrics-port", help="The master's --metrics_port, which lists its nodes.")
]
MooncakeSegment = Annotated[str, typer.Option("--mooncake-segment", help="As store_mooncake_segment.")]
MooncakeProtocol = Annotated[str, typer.Option("--mooncake-protocol", help="As store_mooncake_protocol.")]
ObjectEndpoint = Annotated[str, typer.Option("--object-endpoint", help="As store_object_endpoint.")]
ObjectRegion = Annotated[str, typer.Option("--object-region", help="As store_object_region.")]
ObjectSize = Annotated[str, typer.Option("--object-size", help="As store_object_size.")]
StoreSize = Annotated[str, typer.Option("--store-size", help="As store_size: checks that it fits; 'off': no store.")]
Listen = Annotated[list[str] | None, typer.Option("--listen", help="HOST:PORT to listen on: checks that it is free.")]
Backends = Annotated[list[str] | None, typer.Option("--nixl-backend", help="As nixl_backends; repeatable.")]
OtherPrompt = Annotated[
    Path | None,
    typer.Option(
        "--compare-with", help="A prompt (as --prompt or --messages) that should have the same prefix.", exists=True
    ),
]
OldOtherPrompt = Annotated[Path | None, typer.Option("--like", hidden=True, exists=True)]
Salts = Annotated[
    list[str] | None,
    typer.Option("--cache-salt", help="The prompt's cache_salt; repeat for others that requests may have carried."),
]
Adapter = Annotated[str, typer.Option("--adapter", help="Name of the LoRA adapter that the prompt is for.")]
Threshold = Annotated[int, typer.Option("--pull-threshold", min=0, help="As the engines' option.")]
NotHere = Annotated[bool, typer.Option("--remote", help="Skip this machine: the engines run elsewhere.")]
AsJson = Annotated[bool, typer.Option("--json", help="A list of checks instead of lines.")]


def doctor(
    server: Servers = None,
    endpoint: Endpoints = None,
    socket: Socket = None,
    disk: Disk = None,
    disk_size: DiskSize = "64GiB",
    object_url: ObjectUrl = "",
    object_endpoint: ObjectEndpoint = "",
    object_region: ObjectRegion = "",
    object_size: ObjectSize = "64GiB",
    mooncake_master: MooncakeMaster = "",
    mooncake_metrics_port: MooncakeMetrics = 9003,
    mooncake_segment: MooncakeSegment = "4GiB",
    mooncake_protocol: MooncakeProtocol = "tcp",
    store_size: StoreSize = "10%",
    listen: Listen = None,
    cluster_key: inputs.Key = None,
    nixl_backend: Backends = None,
    prompt: inputs.PromptFile = None,
    messages: inputs.MessagesFile = None,
    compare_with: OtherPrompt = None,
    like: OldOtherPrompt = None,
    cache_salt: Salts = None,
    salt_secret: inputs.SaltSecret = None,
    tenant: inputs.Tenant = "",
    adapter: Adapter = "",
    pull_threshold: Threshold = 64,
    remote: NotHere = False,
    as_json: AsJson = False,
) -> None:
    """Find problems and how to fix them: this machine, engines, the node store, or why a prompt missed.

    Changes nothing, but for an object that --object-url or --mooncake-master writes and deletes.

    Exit status: 0 no problem, 1 warnings, 2 errors or wrong options.
    """
    console = Console(soft_wrap=True, highlight=False)
    with inputs.errors_as_messages(code=2):
        asked = inputs.read_prompt(prompt, messages)
        file = inputs.either(compare_with, like, "--compare-with", "--like")
        other = inputs.read_file(file, messages is not None) if file else None
        if other is not None and asked is None:
            raise typer.BadParameter("needs --prompt or --messages to compare with", param_hint="--compare-with")
        elsewhere = (server, endpoint, socket, disk, object_url, mooncake_master, listen, cluster_key, asked)
        if remote and not any(elsewhere):
            raise typer.BadParameter(
                "leaves nothing to check: give --server, --endpoint or --socket", param_hint="--remote"
            )
        path, *others = [socket or ""] if socket or remote else _own_sockets()
        options = Options(
            servers=tuple(server or ()),
            endpoints=tuple(endpoint or ()),
            socket=path,
            socket_given=socket is not None,
            other_sockets=tuple(others),
            disk=disk,
            disk_size=disk_size,
            object_url=object_url,
            object_endpoint=object_endpoint,
            object_region=object_region,
            object_size=object_size,
            mooncake_master=mooncake_master,
            mooncake_metrics_port=mooncake_metrics_port,
            mooncake_segment=mooncake_segment,
            mooncake_protocol=mooncake_protocol,
            store_size=store_size,
            listen=tuple(listen or ()),
            cluster_key=cluster_key,
            backends=tuple(nixl_backend or ("UCX",)),
            prompt=asked,
            compare_with=other,
            salts=tuple(inputs.salt_of(salt, salt_secret, tenant) for salt in cache_salt or ("",)),
            adapter=adapter,
            threshold=pull_threshold,
            here=not remote,
        )
        checks = examine(options, (lambda check: None) if as_json else lambda check: show(check, console))
    if as_json:
        print(json.dumps(msgspec.to_builtins(checks), indent=1))
    else:
        _print_summary(checks, console)
    raise typer.Exit(exit_code(checks))


def _own_sockets() -> list[str]:
    """The store's, and where else one is looked for."""
    try:
        path = store_path()
        return [path, *(other for other in store_paths() if other != path)]
    except KVTierError as error:
        raise KVTierError(f"the node store's directory cannot be used: {error}") from error


def show(check: Check, console: Console) -> None:
    mark, style = _MARKS[check.state]
    console.print(Text.assemble((mark, style), (check.name, "bold"), ": ", check.message))
    if check.fix and check.state != "ok":
        console.print(Text.assemble(" " * len(mark), "-> ", check.fix), style="dim")


def _print_summary(checks: list[Check], console: Console) -> None:
    count = {state: sum(check.state == state for check in checks) for state in _MARKS}
    if count["ok"] < len(checks):
        unknown = f", {count['unknown']} not known" if count["unknown"] else ""
        console.print(f"\n{count['fail']} errors, {count['warn']} warnings, {count['ok']} ok{unknown}", markup=False)
    else:
        console.print(f"\nAll {count['ok']} checks are ok.", markup=False)
