"""Shared by commands: options, prompts from files, renamed options, tables, errors as messages."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_kvtier.doctor.engines.server import Prompt, Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest, Route
from vllm_kvtier.proxy.messages.tokenization import tokenize_body
from vllm_kvtier.proxy.tenants import Tenants
from vllm_kvtier.renamed import warn

_Value = TypeVar("_Value")
_TOKENIZE_SECONDS = 60.0

ServerUrl = Annotated[str, typer.Option("--server", help="A vLLM server, http://HOST:PORT: tokenizes the prompt.")]
Salt = Annotated[str, typer.Option("--cache-salt", help="The cache_salt that requests with this prompt carry.")]
SaltSecret = Annotated[
    Path | None,
    typer.Option(
        "--salt-secret",
        help="The prompt came through `kvtier proxy`, which salts every request: the proxy's salt_secret_file, or its "
        "cluster_key_file if it has none.",
        exists=True, dir_okay=False,
    ),
]  # fmt: skip
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant",
        help="With --salt-secret, the client: key:NAME of the proxy's api_keys_file, header:NAME as its X-Tenant, or "
        "bearer:FILE with the token that it sends to engines. Default: a client without any.",
    ),
]
StoreName = Annotated[str, typer.Option("--name", help="Name of the store, if a node has several.")]
StoreSocket = Annotated[str | None, typer.Option("--socket", help="The store's socket; default: derived from --name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Key = Annotated[Path | None, typer.Option("--cluster-key", help="The engines' cluster_key_file, if they have one.")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt", help="A file with the text of a prompt.", exists=True, dir_okay=False)
]
MessagesFile = Annotated[
    Path | None,
    typer.Option(
        "--messages", help="A JSON file with a chat's messages, or a whole chat request.", exists=True, dir_okay=False
    ),
]


def read_prompt(prompt: Path | None, messages: Path | None) -> Prompt | None:
    """Raises BadParameter for both, KVTierError for a file that is neither."""
    if prompt is not None and messages is not None:
        raise typer.BadParameter("give either --prompt or --messages")
    return read_file(prompt or messages, messages is not None) if prompt or messages else None


def read_file(file: Path, chat: bool) -> Prompt:
    """Of a chat's request all that changes its tokens, such as its tools."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVTierError(f"{file} cannot be read: {error}") from error
    if not chat:
        return text
    try:
        found = json.loads(text)
    except ValueError as error:
        raise KVTierError(f"{file} is not JSON: {error}") from error
    request = found if isinstance(found, dict) else {"messages": found}
    found = request.get("messages")
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) and "role" in each for each in found):
        raise KVTierError(f'{file} has no messages: a list like [{{"role": "user", "content": "..."}}], or a request')
    body = msgspec.json.encode(tokenize_body(ClientRequest(Route.CHAT, json.dumps(request).encode())))
    # The model may have another name at the server, without what is before it.
    return {"add_generation_prompt": True, **json.loads(body), "model": None}  # a proxy may have other names of models


def tokenize(server: str, prompt: Prompt) -> list[int]:
    """Token ids as the server's completions or chats have them. Raises KVTierError with the server's message."""
    return Server(server, _TOKENIZE_SECONDS).tokenize(prompt)


def salt_of(cache_salt: str, secret: Path | None, tenant: str) -> str:
    """The salt that engines see: with ``secret`` what the proxy makes of the tenant and of the request's own salt."""
    if secret is None:
        if tenant:
            raise typer.BadParameter("needs --salt-secret", param_hint="--tenant")
        return cache_salt
    kind, _, name = tenant.partition(":")
    if tenant and (kind not in ("key", "header", "bearer") or not name):
        raise typer.BadParameter("write key:NAME, header:NAME or bearer:FILE", param_hint="--tenant")
    headers = {"x-tenant": name} if kind == "header" else {}
    if kind == "bearer":
        headers["authorization"] = f"Bearer {read_file(Path(name), chat=False)}"
    tenants = Tenants.from_file(str(secret), trust_header=True)
    return tenants.salt(tenants.identify(headers, name if kind == "key" else None), cache_salt or None)


def either(new: _Value | None, old: _Value | None, new_flag: str, old_flag: str) -> _Value | None:
    """The value of an option that may be given under its old name."""
    if old is None:
        return new
    if new is not None:
        raise typer.BadParameter(f"{old_flag} is the old name of {new_flag}: give one of them")
    warn(old_flag, new_flag)
    return old


def error_console() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


@contextmanager
def errors_as_messages(code: int = 1) -> Iterator[None]:
    """Print a KVTierError and exit with ``code``."""
    try:
        yield
    except KVTierError as error:
        error_console().print(f"error: {error}", markup=False)
        raise typer.Exit(code) from error


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], **style: Any) -> Table:
    """A table without lines; columns are aligned to the right, except those of the heads ``left``."""
    table = Table(**{"box": None, "pad_edge": False, **style})
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right")
    for row in rows:
        table.add_row(*row)
    return table
