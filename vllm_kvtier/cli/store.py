"""``kvtier store``, ``kvtier stats`` and ``kvtier clear``."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_DEFAULT = StoreOptions()

Name = Annotated[str, typer.Option("--name", help="Several stores on one node have different names.")]
Socket = Annotated[
    str | None, typer.Option("--socket", help="The store's socket, instead of the place that follows from --name.")
]


def _option(name: str):
    return typer.Option(f"--{name.replace('_', '-')}", help=help_of(name))


def serve(
    name: Name = "default",
    socket: Socket = None,
    size: Annotated[str, _option("size")] = _DEFAULT.size,
    huge_pages: Annotated[str, _option("huge_pages")] = _DEFAULT.huge_pages,
    numa: Annotated[str, _option("numa")] = _DEFAULT.numa,
    idle_seconds: Annotated[float, _option("idle_seconds")] = _DEFAULT.idle_seconds,
    policy: Annotated[str, _option("policy")] = _DEFAULT.policy,
    tenant_share: Annotated[float, _option("tenant_share")] = _DEFAULT.tenant_share,
    pin_share: Annotated[float, _option("pin_share")] = _DEFAULT.pin_share,
    lease_seconds: Annotated[float, _option("lease_seconds")] = _DEFAULT.lease_seconds,
    reserve_seconds: Annotated[float, _option("reserve_seconds")] = _DEFAULT.reserve_seconds,
    log_file: Annotated[str, _option("log_file")] = _DEFAULT.log_file,
    log_level: Annotated[str, _option("log_level")] = _DEFAULT.log_level,
) -> None:
    """Serve this node's store here, until Ctrl-C. Engines start one themselves if they find none."""
    from vllm_kvtier.store.__main__ import run  # brings the server, which the other commands do not need

    with _errors_in_words():
        options = StoreOptions(
            size=size,
            huge_pages=huge_pages,
            numa=numa,
            idle_seconds=idle_seconds,
            policy=policy,
            tenant_share=tenant_share,
            pin_share=pin_share,
            lease_seconds=lease_seconds,
            reserve_seconds=reserve_seconds,
            log_file=log_file,
            log_level=log_level,
        )
        raise typer.Exit(run(socket or store_path(name), options))


def stats(
    name: Name = "default",
    socket: Socket = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """What the store holds, who uses it, and how well it does."""
    with _errors_in_words():
        counts = _ask(socket or store_path(name), lambda client: client.stat())
    fields = msgspec.to_builtins(counts)
    del fields["id"], fields["type"]  # of the message, not of the store
    if as_json:
        print(json.dumps(fields))
        return
    table = Table(show_header=False, box=None)
    clients, index = fields.pop("clients"), fields.pop("index")
    for key, value in {**fields, **index}.items():
        words = key.replace("_", " ")
        shown = f"{value} ({in_words(value)})" if key.endswith("_bytes") else str(value)
        table.add_row(words, f"{value:.1f}" if isinstance(value, float) else shown)
    for client in clients:
        table.add_row(client["kind"], f"{client['name']} (pid {client['pid']})")
    Console().print(table)


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
    app.command("store")(serve)
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
