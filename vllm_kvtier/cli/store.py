"""``kvtier store``, ``kvtier stats`` and ``kvtier clear``."""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_kvtier.cli import inputs
from vllm_kvtier.doctor.store import request, request_counts
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import store_path
from vllm_kvtier.store.memory.memory_limits import format_bytes
from vllm_kvtier.store.options import StoreOptions, help_of

ANSWER_SECONDS = 10.0
CLEAR_SECONDS = 600.0  # 7 us a block, of a large disk too; the store answers others meanwhile

_PENDING = (
    "its blocks are dropped once it can record that; if the store ends before, all of them come back. Run the command "
    "again when `kvtier stats` shows the tier as ready"
)


def _with_store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with a parameter for each option instead of ``**options``, as typer needs it."""
    parameters = list(inspect.signature(command).parameters.values())[:-1]
    for option in fields(StoreOptions):
        switch = typer.Option(f"--{option.name.replace('_', '-')}", help=help_of(option.name))
        kind = Annotated[type(option.default), switch]
        parameters.append(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)
        )
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@_with_store_options
def serve(
    name: inputs.StoreName = "default",
    socket: inputs.StoreSocket = None,
    **options,
) -> None:
    """Serve this node's store until Ctrl-C. An engine that finds no store starts one itself."""
    from vllm_kvtier.store.__main__ import run  # imports the server, which the other commands do not need

    with inputs.errors_as_messages(code=2):
        path, given = socket or store_path(name), StoreOptions(**options)
    raise typer.Exit(run(path, given))


def stats(
    name: inputs.StoreName = "default", socket: inputs.StoreSocket = None, as_json: inputs.AsJson = False
) -> None:
    """Show the store's counts, tiers and clients."""
    with inputs.errors_as_messages():
        counts = request_counts(socket or store_path(name), "kvtier stats", ANSWER_SECONDS)
    numbers = msgspec.to_builtins(counts)
    del numbers["id"], numbers["type"]  # of the message, not of the store
    if as_json:
        print(json.dumps(numbers))
        return
    table = Table(show_header=False, box=None)
    clients, tiers, index, directory = (numbers.pop(name) for name in ("clients", "tiers", "index", "directory"))
    _add_rows(table, "", {**numbers, **index})
    if directory["holders"]:
        _add_rows(table, "directory ", directory)
    for tier in tiers:
        name, extra, nodes = tier.pop("name"), tier.pop("extra"), tier.pop("nodes")
        _add_rows(table, f"{name} ", {**tier, **extra})
        for address, error in nodes.items():
            table.add_row(f"node {address}", {None: "not known yet", "": "answers"}.get(error, error))
    for client in clients:
        table.add_row(client["kind"], f"{client['name']} (pid {client['pid']})")
    console = Console(markup=False)
    if console.is_terminal:
        console.print(table)
        return
    for name, value in zip(*(column.cells for column in table.columns), strict=True):  # for grep, as the guides show it
        print(name, value)


def _add_rows(table: Table, of: str, numbers: dict) -> None:
    for key, value in numbers.items():
        if value == "":
            continue
        shown = f"{value} ({format_bytes(value)})" if key.endswith("_bytes") else str(value)
        if isinstance(value, float):
            shown = f"{value:.{int(not value.is_integer())}f}"
        table.add_row(of + key.replace("_", " "), shown)


def clear(
    name: inputs.StoreName = "default",
    socket: inputs.StoreSocket = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", help="Only blocks of this id (32 hexadecimal digits); `kvtier inspect` prints it."),
    ] = None,
    space: Annotated[str | None, typer.Option("--space", hidden=True)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of all models.")] = False,
) -> None:
    """Drop stored blocks. Give --namespace or --all.

    Exit status 1: the store does not answer, or a tier of its own has not recorded it.
    """
    namespace = inputs.either(namespace, space, "--namespace", "--space")
    if everything == (namespace is not None):
        raise typer.BadParameter("give either --namespace or --all")
    try:
        wanted = None if namespace is None else bytes.fromhex(namespace)
    except ValueError:
        wanted = b""
    if wanted is not None and len(wanted) != m.HASH_BYTES:
        raise typer.BadParameter(f"a namespace id has {2 * m.HASH_BYTES} hexadecimal digits", param_hint="--namespace")
    with inputs.errors_as_messages():
        done = request(socket or store_path(name), m.Clear(1, wanted), m.Done, "kvtier clear", CLEAR_SECONDS)
    print(f"{done.count} blocks dropped")
    if done.reason:
        print(f"{done.reason}: {_PENDING}", file=sys.stderr)
        raise typer.Exit(1)
