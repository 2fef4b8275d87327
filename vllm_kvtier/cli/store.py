"""``kvtier store``, ``kvtier stats`` and ``kvtier clear``."""

import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.client import Failed, Pending, StoreClient
from vllm_kvtier.store.launch import store_path
from vllm_kvtier.store.limits import in_words
from vllm_kvtier.store.options import StoreOptions, help_of
from vllm_kvtier.wire.reactor import Reactor

ANSWER_SECONDS = 10.0

Name = Annotated[str, typer.Option("--name", help="Several stores on one node have different names.")]
Socket = Annotated[
    str | None, typer.Option("--socket", help="The store's socket, instead of the place that follows from --name.")
]


def serve(name: Name = "default", socket: Socket = None, **options) -> None:
    """Serve this node's store here, until Ctrl-C. Engines start one themselves if they find none."""
    from vllm_kvtier.store.__main__ import run  # brings the server, which the other commands do not need

    with _errors_in_words():
        raise typer.Exit(run(socket or store_path(name), StoreOptions(**options)))


def _with_store_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with a parameter for each of StoreOptions, in place of ``**options``, for typer to see."""
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


def stats(
    name: Name = "default",
    socket: Socket = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """What the store holds, who uses it, and how well it does."""
    with _errors_in_words():
        counts = _ask(socket or store_path(name), lambda client: client.stat())
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
        name, extra = tier.pop("name"), tier.pop("extra")
        _add_rows(table, f"{name} ", {**tier, **extra})
    for client in clients:
        table.add_row(client["kind"], f"{client['name']} (pid {client['pid']})")
    Console().print(table)


def _add_rows(table: Table, of: str, numbers: dict) -> None:
    for key, value in numbers.items():
        shown = f"{value} ({in_words(value)})" if key.endswith("_bytes") else str(value)
        fraction = isinstance(value, float) and not value.is_integer()
        table.add_row(of + key.replace("_", " "), f"{value:.1f}" if fraction else shown.removesuffix(".0"))


def clear(
    name: Name = "default",
    socket: Socket = None,
    space: Annotated[str | None, typer.Option("--space", help="Only this space, 32 hexadecimal digits.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything, whatever model it belongs to.")] = False,
) -> None:
    """Forget what is stored. Give --space or --all."""
    if everything == (space is not None):
        raise typer.BadParameter("give either --space or --all")
    try:
        wanted = None if space is None else bytes.fromhex(space)
    except ValueError:
        wanted = b""
    if wanted is not None and len(wanted) != m.HASH:
        raise typer.BadParameter(f"a space is {2 * m.HASH} hexadecimal digits", param_hint="--space")
    with _errors_in_words():
        done = _ask(socket or store_path(name), lambda client: client.clear(wanted))
    print(f"{done.count} blocks are forgotten")


def add_to(app: typer.Typer) -> None:
    app.command("store")(_with_store_options(serve))
    app.command("stats")(stats)
    app.command("clear")(clear)


@contextmanager
def _errors_in_words() -> Iterator[None]:
    try:
        yield
    except KVTierError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        raise typer.Exit(1) from error


def _ask(path: str, question: Callable[[StoreClient], Pending]) -> msgspec.Struct:
    """One question on a connection of its own. Raises KVTierError where there is no answer."""
    reactor, changed = Reactor("kvtier-cli"), threading.Event()
    hello = m.Hello("kvtier", os.getpid(), "tool")
    client = StoreClient(reactor, path, hello, ask_timeout=ANSWER_SECONDS, on_change=changed.set)
    client.start()
    reactor.start()
    try:
        changed.wait(ANSWER_SECONDS + 1)  # connected, or knows why not
        pending = question(client)
        pending.wait(ANSWER_SECONDS + 1)
    finally:
        reactor.stop()
    if isinstance(pending.outcome, Failed):
        raise KVTierError(pending.outcome.reason)
    return pending.outcome
