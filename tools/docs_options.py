#!/usr/bin/env python3
"""Write docs/options.md: every option of engines, of the node store and of the proxy, from where they are defined.

usage: docs_options.py [--check]        --check writes nothing: exit status 1 if the page is not what it should be

Needs what the proxy's command line needs (typer), and no vLLM.
"""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from vllm_kvtier.cli.proxy import _texts
from vllm_kvtier.config import KVTierConfig, _type_in_words, markdown_table
from vllm_kvtier.proxy.config import ROLES, EngineAddress, ProxyConfig
from vllm_kvtier.proxy.config_file import ServerOptions
from vllm_kvtier.store.options import StoreOptions

PAGE = Path(__file__).parents[1] / "docs/options.md"

# Of an engine in the file; in EngineAddress ``kv`` is two fields, and ``role`` none.
ENGINE_ROWS = {
    "role": ("prefill, decode or pooling", "", "What it is for; one engine may stand there twice, in two roles."),
    "url": ("a string", "", "`http://HOST:PORT` or `https://...`, without `/v1`."),
    "kv": ("a string", "", "`HOST:PORT` of its connector's endpoint, where its answers do not name it."),
}

INTRO = """# Every option

Made by `make docs` from where the options are defined; do not edit it. Which of them matter for a task is in the
[guides](README.md).
"""
ENGINES = """## Engines

Keys of `kv_connector_extra_config` in `--kv-transfer-config`. An option that is unknown, of a wrong type or impossible
together with another one stops the engine with a sentence that names it.
"""
STORE = """## The node store

Flags of `kvtier store` (and of `python -m vllm_kvtier.store`). *Engine's option*: what an engine that starts the store
passes on to it. Beside these: `--name` (several stores of one user on a node), `--socket` (where it listens instead).
"""
PROXY = """## The proxy

Keys of its configuration file; on the command line flags with dashes instead of underscores, and `--report` for
`allow_report`, `--extra-route` for `extra_routes`. Seconds and bytes. [proxy.md](proxy.md) explains them.
"""
PROXY_ENGINES = """### An engine

Keys of each of `engines` in the file. On the command line: `--prefill`, `--decode` or `--pooling`
`URL[,kv=HOST:PORT][,weight=N]`.
"""


def page() -> str:
    engines = markdown_table() + "\n"
    proxy = [PROXY, proxy_table(), PROXY_ENGINES, engine_table()]
    return "\n".join([INTRO, ENGINES, engines, STORE, store_table(), *proxy])


def store_table() -> str:
    rows = []
    for option in fields(StoreOptions):
        choices = option.metadata["choices"]
        own = option.name if option.name == "cluster_key_file" else f"store_{option.name}"
        passed = own if own in KVTierConfig.__struct_fields__ else None
        kind = " or ".join(f'"{choice}"' for choice in choices) or _type_in_words(type(option.default))
        flag, engine = f"`--{option.name.replace('_', '-')}`", f"`{passed}`" if passed else ""
        rows.append((flag, kind, _shown(option.default), engine, option.metadata["help"]))
    return _table(("Flag", "Value", "Default", "Engine's option", "Meaning"), rows)


def proxy_table() -> str:
    rows = []
    for kind in (ServerOptions, ProxyConfig):
        rows += [row for name, row in _struct_rows(kind) if name not in ROLES]
    return _table(("Key", "Value", "Default", "Meaning"), rows)


def engine_table() -> str:
    rows = [(f"`{name}`", *row) for name, row in ENGINE_ROWS.items()]
    rows += [row for name, row in _struct_rows(EngineAddress) if name not in ("url", "kv_host", "kv_port")]
    return _table(("Key", "Value", "Default", "Meaning"), rows)


def _struct_rows(kind: type) -> Iterable[tuple[str, tuple[str, ...]]]:
    """An option's name and row. One without a comment of its own shares the one before it."""
    texts, hints, text = _texts(kind), get_type_hints(kind), ""
    for field in msgspec.structs.fields(kind):
        text = texts.get(field.name) or text
        if field.name in ROLES:
            continue
        yield field.name, (f"`{field.name}`", _type_in_words(hints[field.name]), _shown(field.default), text)


def _shown(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return ""
    return f"`{msgspec.json.encode(default).decode()}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> int:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text("utf-8") == wanted:
            return 0
        print(f"{PAGE} is not what the options are: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, "utf-8")
    print(f"{PAGE} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
