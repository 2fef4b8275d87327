"""Engines of this node are asked directly: an HTTP proxy of the environment knows no 127.0.0.1 of ours."""

import ast
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_kvtier.devtools import clients
from vllm_kvtier.doctor.machine import mooncake

CALLS = {"get", "post", "put", "delete", "head", "request", "stream", "Client", "AsyncClient"}
CHOICE = {"index": 0, "finish_reason": "stop"}
ANSWER = {"choices": [{**CHOICE, "text": "yes"}]}
EVENTS = [{"choices": [{**CHOICE, "delta": {"content": "yes"}}]}]


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(b"node" if self.path == "/get_all_segments" else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS)
        self._send((lines if body.get("stream") else json.dumps(ANSWER)).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def url(monkeypatch) -> Iterator[str]:
    """An engine's, in an environment whose proxy does not answer."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_clients_reach_engines_beside_the_environments_proxy(url):
    message = [{"role": "user", "content": "?"}]
    assert clients.prompt_tokens(url).total == 0 and clients.complete(url, "?").text == "yes"
    assert clients.chat(url, message, stream=True).text == "yes"


def test_doctor_reaches_mooncake_beside_the_environments_proxy(url):
    assert mooncake._segments("mooncake", url).state == "ok"


@pytest.mark.parametrize("folder", ["vllm_kvtier", "examples", "benchmarks", "tools"])
def test_no_client_of_httpx_trusts_the_environment(root, folder):
    trusting = []
    for file in (root / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("httpx"), attr=name)) if name in CALLS:
                    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    if given.get("trust_env") != "False":
                        trusting.append(f"{file.relative_to(root)}:{node.lineno}")
    assert trusting == []
