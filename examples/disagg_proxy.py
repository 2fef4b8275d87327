#!/usr/bin/env python
"""A router for one prefill engine and one decode engine, as a starting point for your own.

    python examples/disagg_proxy.py http://127.0.0.1:8100 http://127.0.0.1:8200 --port 8000

The same with all options, for several engines: ``kvtier proxy --help``. Both are thin over ``vllm_kvtier.proxy``, whose
application (ASGI) can also be served by a server of yours, if that runs its lifespan.
"""

import argparse

import uvicorn

from vllm_kvtier.proxy.app import create_app
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.routes.connections import BoundedProtocol


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefill", help="URL of the engine that computes prompts")
    parser.add_argument("decode", help="URL of the engine that generates")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()

    config = ProxyConfig(
        prefill=(EngineAddress.parse(options.prefill),),
        decode=(EngineAddress.parse(options.decode),),
    )
    uvicorn.run(create_app(config), http=BoundedProtocol, host=options.host, port=options.port, access_log=False)


if __name__ == "__main__":
    main()
