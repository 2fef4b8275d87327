"""An object tier's node, and a bucket that answers a share of its requests with an error."""

import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from object_nodes import BLOCKS, Node, block_hashes_of, blocks_of
from support import eventually

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
BROKEN = b"<Error><Code>InternalError</Code></Error>"
SHARE = 0.2  # so many answers are errors; the client repeats each request once


class Bucket:
    """``fail``: (status, body) of the errors, or None."""

    def __init__(self):
        self.fail, self._objects = None, {}
        self._chance, self._lock = random.Random(3), threading.Lock()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                bucket.answer(self, self.path.split("?")[0], self.rfile.read(int(self.headers["Content-Length"] or 0)))

            do_HEAD = do_PUT = do_GET

            def log_message(self, *arguments):
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler, path, data):
        status, body = 200, b""
        with self._lock:
            if self.fail is not None and self._chance.random() < SHARE:
                status, body = self.fail
            elif handler.command == "PUT":
                self._objects[path] = data
            elif path in self._objects:
                body = self._objects[path]
            else:
                status, body = 404, b"<Error><Code>NoSuchKey</Code></Error>"
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", '"e"')
        handler.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def bucket():
    bucket = Bucket()
    yield bucket
    bucket.close()


@pytest.fixture
def node(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    node = Node(bucket.endpoint)
    yield node.ready()
    node.stop()


@pytest.mark.parametrize("fail", [(503, SLOW_DOWN), (429, b""), (500, BROKEN)])
def test_object_tier_stays_while_a_share_of_requests_fails(bucket, node, fail):
    """Its process was killed by the first failed request, and was away for up to a minute each time."""
    prompts = [block_hashes_of(f"prompt {number}") for number in range(40)]
    for prompt in prompts[:2]:
        assert node.write(blocks_of(prompt)) == [True] * BLOCKS
    bucket.fail = fail
    for prompt in prompts[2:]:
        assert node.find(prompt).num_hash_blocks == 0
    counts = node.tier.counts()
    assert (counts.state, counts.restarts, len(node.pids)) == ("ready", 0, 1)
    assert counts.lookups == 38 and 0 < counts.failed_lookups < 38
    whole = [True] * BLOCKS
    for prompt in prompts[:2]:
        eventually(lambda prompt=prompt: node.read(prompt) == (whole, whole), 60, "a read without a failure")
    late = blocks_of(prompts[2])
    eventually(lambda: node.write(late) == whole, 60, "a write without a failure")
    assert node.tier.usable and node.tier.counts().restarts == 0 and len(node.pids) == 1
