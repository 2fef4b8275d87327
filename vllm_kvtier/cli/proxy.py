"""``kvtier proxy``, also ``python -m vllm_kvtier.proxy``: a flag for every option; flags override the file."""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from vllm_kvtier.cli import inputs
from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.config import RENAMED, ROLES, EngineAddress, ProxyConfig
from vllm_kvtier.proxy.config_file import ServerOptions, Settings, load_settings
from vllm_kvtier.proxy.kv_events.index import BLOCK_BYTES
from vllm_kvtier.store.memory.memory_limits import MemoryLimits, format_bytes, memory_limits

logger = get_logger(__name__)

_ENGINE = "http://HOST:PORT[,kv=HOST:PORT][,events=HOST:PORT][,replay=HOST:PORT][,weight=N]"


def proxy(config: str | None, **options: Any) -> None:
    """Route OpenAI requests over prefill and decode engines that run vllm-kvtier.

    Give engines by --prefill and --decode, or in a file (--config; see docs/proxy.md). Flags override the file.
    """
    try:
        from vllm_kvtier.proxy.server import serve  # imports packages that only a running proxy needs
    except ModuleNotFoundError as error:
        sys.exit(f"The proxy needs the package {error.name}, which is not installed: pip install 'vllm-kvtier[proxy]'")

    with inputs.errors_as_messages(code=2):
        serve(config, lambda: load_settings(config, _engines_read(options)), _warn)


def _warn(settings: Settings) -> None:
    for warning in (keys_warning(settings), kv_events_warning(settings.proxy)):
        if warning:
            logger.warning("kvtier: proxy: %s", warning)


def keys_warning(settings: Settings) -> str:
    """Whether clients that nothing checks use engines with the proxy's key; "": no."""
    proxy = settings.proxy
    addresses = (address for role in ROLES for address in getattr(proxy, role))
    keyed = next((address.url for address in addresses if address.api_key_file is not None), None)
    checked = proxy.api_keys_file is not None or proxy.trust_tenant_header
    if keyed is None or checked or settings.server.tls_client_ca_file is not None:
        return ""
    return (
        f"{keyed} has api_key_file, and no client is checked: a request with any key, or without one, is sent there "
        "with the proxy's key. Set api_keys_file, or remove api_key_file to have the engine check the clients' keys"
    )


def kv_events_warning(config: ProxyConfig, read_limits: Callable[[], MemoryLimits] = memory_limits) -> str:
    """What is wrong with the indexes of KV events: there are none, or they may need more memory than is free; "":
    nothing, or the memory is not known."""
    if config.routing_policy != "kv_events":
        return ""
    addresses = [address for role in ROLES for address in getattr(config, role)]
    engines = len({(each.events, each.replay) for each in addresses if each.events is not None})
    if not engines:
        return "routing_policy is kv_events, but no engine has events=HOST:PORT; prefix_hash decides"
    try:
        limits = read_limits()
    except FileNotFoundError:  # no /proc: not on Linux
        return ""
    needed = engines * config.max_blocks * BLOCK_BYTES
    if needed <= limits.fits:
        return ""
    return (
        f"max_blocks={config.max_blocks} of {engines} engines may take {format_bytes(needed)}, and "
        f"{format_bytes(limits.fits)} are free ({limits.source}): lower max_blocks to "
        f"{limits.fits // (engines * BLOCK_BYTES)}, or give the proxy more memory"
    )


def command() -> Callable[..., None]:
    """Return ``proxy`` with a parameter for each option instead of ``**options``, as typer needs it."""

    switch = typer.Option("--config", help="A YAML, TOML or JSON file with engines and options.")

    def run(config: Annotated[str | None, switch] = None, **options) -> None:
        proxy(config, **options)

    parameters = [inspect.signature(run).parameters["config"]]
    for kind in (ServerOptions, ProxyConfig):
        texts, hints = _texts(kind), get_type_hints(kind)
        for field in msgspec.structs.fields(kind):
            parameters.append(_parameter(field.name, field, hints[field.name], texts[field.name]))
            old = (old for old, new in RENAMED.items() if new == field.name)
            parameters += (_parameter(name, field, hints[field.name], "", hidden=True) for name in old)
    run.__doc__ = proxy.__doc__
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(
    parameter: str, field: msgspec.structs.FieldInfo, hint: Any, text: str, hidden: bool = False
) -> inspect.Parameter:
    """Defaults are None, so that only given flags override the file."""
    name = "report" if parameter == "allow_report" else parameter.replace("_", "-")
    if field.name in ROLES or field.name == "extra_routes":
        metavar = _ENGINE if field.name in ROLES else "PATH"
        name = name if field.name in ROLES else "extra-route"
        switch = typer.Option(f"--{name}", help=f"{text} Repeat for several.", metavar=metavar)
        kind: Any = list[str] | None
    else:
        default = field.default
        shown = "" if default is None or default is msgspec.NODEFAULT else f" (default: {_shown(default)})"
        switch = typer.Option(
            f"--{name}/--no-{name}" if hint is bool else f"--{name}", help=text + shown, hidden=hidden
        )
        kind = hint if hint == str | None else hint | None
    return inspect.Parameter(
        parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, switch]
    )


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _texts(kind: type) -> dict[str, str]:
    """Return each option's meaning: the comment (#:) before it."""
    texts: dict[str, str] = {}
    comment: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        line = line.strip()
        if line.startswith("#: "):
            comment.append(line[3:].replace("``", ""))
        elif found := re.match(r"(\w+): .*", line):
            texts[found[1]] = " ".join(comment)
            comment = []
    return texts


def _engines_read(options: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError."""
    read = {role: tuple(EngineAddress.parse(text) for text in options.get(role) or ()) for role in ROLES}
    return options | read | {"extra_routes": tuple(options.get("extra_routes") or ())}
