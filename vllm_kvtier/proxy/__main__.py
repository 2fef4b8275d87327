"""``python -m vllm_kvtier.proxy``: run the proxy."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

from vllm_kvtier.errors import ConfigError

try:
    import typer
    import uvicorn

    from vllm_kvtier.proxy.app import create_app
except ModuleNotFoundError as error:
    sys.exit(
        f"The proxy needs the package {error.name}, which is not installed: pip install 'vllm-kvtier[proxy]'"
    )

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.tenants import Tenants
from vllm_kvtier.wire.auth import ClusterKey

_DEFAULT = ProxyConfig(decode=(EngineAddress("http://decode"),))
_ADDRESS = "http://HOST:PORT[,kv=HOST:PORT]"


def _option(name: str, text: str, **more):
    return typer.Option(f"--{name}", help=text, show_default=more.pop("show_default", True), **more)


def serve(
    decode: Annotated[list[str], _option("decode", "A decode engine; repeat for several.", metavar=_ADDRESS)],
    prefill: Annotated[
        list[str] | None, _option("prefill", "A prefill engine; repeat for several.", metavar=_ADDRESS)
    ] = None,
    host: Annotated[str, _option("host", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _option("port", "Port to listen on.")] = 8000,
    bidirectional: Annotated[
        bool, typer.Option(help="Tell P which D has the conversation, so that P pulls from it.")
    ] = _DEFAULT.bidirectional,
    min_prefill_chars: Annotated[
        int, _option("min-prefill-chars", "Shorter prompts are computed by D alone.")
    ] = _DEFAULT.min_prefill_chars,
    connect_timeout: Annotated[
        float, _option("connect-timeout", "Seconds to connect to an engine.")
    ] = _DEFAULT.connect_timeout,
    prefill_timeout: Annotated[
        float, _option("prefill-timeout", "Seconds for P's whole answer; later D computes alone.")
    ] = _DEFAULT.prefill_timeout,
    first_byte_timeout: Annotated[
        float, _option("first-byte-timeout", "Seconds until a stream begins; later another D is tried.")
    ] = _DEFAULT.first_byte_timeout,
    stream_idle_timeout: Annotated[
        float, _option("stream-idle-timeout", "Longest silence within a stream, in seconds.")
    ] = _DEFAULT.stream_idle_timeout,
    answer_timeout: Annotated[
        float, _option("answer-timeout", "Seconds for an answer that is not streamed.")
    ] = _DEFAULT.answer_timeout,
    query_timeout: Annotated[
        float, _option("query-timeout", "Seconds for each of the two steps of /kvtier/query.")
    ] = _DEFAULT.query_timeout,
    conversations_kept: Annotated[
        int, _option("conversations-kept", "So many conversations' routes are kept.")
    ] = _DEFAULT.conversations_kept,
    conversation_ttl: Annotated[
        float, _option("conversation-ttl", "Seconds until an unused route is forgotten.")
    ] = _DEFAULT.conversation_ttl,
    trust_tenant_header: Annotated[
        bool, typer.Option(help="Take the tenant from X-Tenant. Only behind a gateway that sets it.")
    ] = _DEFAULT.trust_tenant_header,
    salt_secret_file: Annotated[
        str | None,
        _option("salt-secret-file", "Secret behind the tenants' salts; default: random per start."),
    ] = None,
    cluster_key_file: Annotated[
        str | None, _option("cluster-key-file", "The engines' cluster key, if they have one.")
    ] = None,
    expose_params: Annotated[
        bool, typer.Option(help="Debugging: leave kv_transfer_params in answers.")
    ] = _DEFAULT.expose_params,
    report: Annotated[bool, typer.Option(help="Honour X-KVTier-Report: 1.")] = _DEFAULT.allow_report,
    log_level: Annotated[str, _option("log-level", "debug, info, warning or error.")] = "info",
) -> None:
    """Route OpenAI requests over prefill and decode engines that run vllm-kvtier."""
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(
            f"{log_level!r}: choose debug, info, warning or error.", param_hint="--log-level"
        )
    try:
        config = ProxyConfig(
            prefill=tuple(EngineAddress.parse(text) for text in prefill or ()),
            decode=tuple(EngineAddress.parse(text) for text in decode),
            bidirectional=bidirectional,
            min_prefill_chars=min_prefill_chars,
            connect_timeout=connect_timeout,
            prefill_timeout=prefill_timeout,
            first_byte_timeout=first_byte_timeout,
            stream_idle_timeout=stream_idle_timeout,
            answer_timeout=answer_timeout,
            query_timeout=query_timeout,
            conversations_kept=conversations_kept,
            conversation_ttl=conversation_ttl,
            trust_tenant_header=trust_tenant_header,
            salt_secret_file=salt_secret_file,
            cluster_key_file=cluster_key_file,
            expose_params=expose_params,
            allow_report=report,
        )
        # Read here only to refuse bad ones before anything listens.
        Tenants.from_file(salt_secret_file, trust_header=trust_tenant_header)
        if cluster_key_file is not None:
            ClusterKey.load(cluster_key_file)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A line for each request to an engine is noise even at level info.
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uvicorn.run(
        create_app(config),
        host=host,
        port=port,
        log_level=log_level,
        access_log=log_level == "debug",
        timeout_graceful_shutdown=10,
    )


def main() -> None:
    """The command; also what examples/disagg_proxy.py runs."""
    typer.run(serve)


if __name__ == "__main__":
    main()
