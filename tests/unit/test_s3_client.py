"""How bytes get to a bucket and back: boto3 and what it says of errors, in our words; NIXL's OBJ beside it."""

import http.server
import logging
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.objects import transfers as object_data
from vllm_kvtier.store.tiers.objects.object_names import parse_url
from vllm_kvtier.store.tiers.objects.s3_client import Bucket, Kind, Trouble

KEY_ID, SECRET, TOKEN = "AKIAUNITTESTKEY", "unit/test/secret+of+forty+characters", "session-token-of-a-test"


class Server:
    """Answers all requests as ``reply`` says: (status, headers, body). ``seen``: (method, path, headers)."""

    def __init__(self):
        self.reply, self.seen = (200, {}, b""), []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                size = int(self.headers.get("Content-Length", 0))
                outer.body = self.rfile.read(size)
                outer.seen.append((self.command, self.path, dict(self.headers)))
                status, headers, body = outer.reply
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                self.close_connection = headers.get("Connection") == "close"

            do_GET = do_PUT = do_HEAD = do_DELETE = answer

            def log_message(self, *arguments):
                """Quiet."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def error(self, status, code):
        """What a server might say that repeats all it was told."""
        said = f"{KEY_ID} {SECRET} {TOKEN}"
        body = f"<Error><Code>{code}</Code><Message>{said}</Message><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId></Error>"
        self.reply = status, {"Content-Type": "application/xml"}, body.encode()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="module")
def made(server):
    """One for all: making a client takes boto3 a third of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_SESSION_TOKEN", TOKEN)
        # The tests are about what is said at last, not about how often it is tried.
        patch.setattr("vllm_kvtier.store.tiers.objects.s3_client.MAX_ATTEMPTS", 1)
        yield Bucket(parse_url("s3://bucket/x"), server.endpoint, "eu-west-1", timeout=1.0, connections=4)


@pytest.fixture
def bucket(server, made):
    server.seen.clear()
    made.denied_is_absent = False
    return made


def trouble_of(call) -> Trouble:
    """Its trouble, after a look at all that a log with tracebacks would show of it."""
    with pytest.raises(Trouble) as caught:
        call()
    trouble = caught.value
    assert trouble.__cause__ is None and isinstance(trouble.__context__, (Trouble, type(None)))
    for secret in (KEY_ID, SECRET, TOKEN):
        assert secret not in repr(trouble)
    return trouble


@pytest.mark.parametrize(
    "status, code, kind, words",
    [
        (403, "AccessDenied", Kind.FORBIDDEN, "lack the right"),
        (403, "InvalidAccessKeyId", Kind.DENIED, "does not know the access key"),
        (403, "SignatureDoesNotMatch", Kind.DENIED, "secret key"),
        (400, "ExpiredToken", Kind.DENIED, "expired"),
        (404, "NoSuchBucket", Kind.FAILED, "no such bucket"),
        (404, "NoSuchKey", Kind.ABSENT, "not there"),
        (400, "IllegalLocationConstraintException", Kind.FAILED, "another region"),
        (500, "InternalError", Kind.FAILED, "it fails (InternalError, HTTP 500)"),
        (503, "SlowDown", Kind.FAILED, "fewer requests"),
        (507, KEY_ID + " <b>", Kind.FAILED, "it fails (no code, HTTP 507)"),
        (418, "Teapot", Kind.FAILED, "refuses"),
    ],
)
def test_s3_errors_are_translated(server, bucket, status, code, kind, words):
    server.error(status, code.replace("<", "&lt;"))
    into = memoryview(bytearray(10))
    for call in (lambda: bucket.get("k", into, math.inf), lambda: bucket.put("k", into), lambda: bucket.read("k", 9)):
        trouble = trouble_of(call)
        assert trouble.kind is kind and words in str(trouble)


def test_s3_missing_object_without_list_permission_is_absent(server, bucket):
    server.reply = 403, {}, b""
    assert trouble_of(lambda: bucket.size("k")).kind is Kind.FORBIDDEN
    bucket.denied_is_absent = True
    assert bucket.size("k") is None
    server.error(403, "AccessDenied")
    assert trouble_of(lambda: bucket.get("k", memoryview(bytearray(9)), math.inf)).kind is Kind.ABSENT
    server.error(403, "InvalidAccessKeyId")
    assert trouble_of(lambda: bucket.get("k", memoryview(bytearray(9)), math.inf)).kind is Kind.DENIED
    server.reply = 404, {}, b""
    assert bucket.size("k") is None


def test_s3_partial_body_is_an_error(server, bucket):
    data = bytes(range(256)) * 4096
    into = memoryview(bytearray(len(data)))
    server.reply = 200, {}, data
    bucket.get("k", into, math.inf)
    assert into == data and bucket.size("k") == len(data)
    connections = len({headers["Host"] for _, _, headers in server.seen})
    assert connections == 1
    for shorter in (data[:-1], b"", data + b"x"):
        server.reply = 200, {}, shorter
        assert trouble_of(lambda: bucket.get("k", into, math.inf)).kind is Kind.ABSENT
    # It says that it sends all, and stops.
    server.reply = 200, {"Content-Length": str(len(data)), "Connection": "close"}, data[:1000]
    assert "broke" in str(trouble_of(lambda: bucket.get("k", into, math.inf)))
    server.reply = 200, {"Content-Length": str(len(data))}, data[:1000]
    assert "no answer in time" in str(trouble_of(lambda: bucket.get("k", into, math.inf)))
    server.reply = 200, {}, data
    assert "too long" in str(trouble_of(lambda: bucket.get("k", into, 0.0)))


def test_s3_requests_send_the_bytes_without_chunked_encoding(server, bucket):
    server.reply = 200, {}, b""
    data = memoryview(bytes(range(256)) * 12345)
    bucket.put("k", data)
    method, path, headers = server.seen[-1]
    assert (method, path) == ("PUT", "/bucket/k") and server.body == data
    assert "Expect" not in headers and "aws-chunked" not in headers.get("Content-Encoding", "")
    bucket.delete("k")
    assert server.seen[-1][:2] == ("DELETE", "/bucket/k")
    assert not any("list" in path or path.endswith("/bucket") for _, path, _ in server.seen)


def test_s3_without_server_or_credentials_raises(monkeypatch, bucket):
    away = Bucket(parse_url("s3://bucket/x"), "http://127.0.0.1:9", "eu-west-1", timeout=1.0, connections=1)
    assert "cannot be reached" in str(trouble_of(lambda: away.size("k")))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    without = Bucket(parse_url("s3://bucket/x"), bucket.endpoint, "eu-west-1", timeout=1.0, connections=1)
    trouble = trouble_of(lambda: without.size("k"))
    assert trouble.kind is Kind.DENIED and "AWS_PROFILE" in str(trouble)
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    trouble = trouble_of(lambda: Bucket(parse_url("s3://b-1"), "", "", timeout=1.0, connections=1))
    assert "AWS_PROFILE does not exist" in str(trouble)


# -- OBJ ----------------------------------------------------------------------------------------------------------


class FakeAgent:
    """Transfers end when the test says so; ``objects`` is the bucket."""

    def __init__(self, memory):
        self.memory, self.objects, self.under_way, self.good = memory, {}, [], True

    def transfer(self, op, local, remote, done, *, memory):
        assert memory == "OBJ" and local.dtype == np.uint64 and local.shape == (1, 3) and len(remote) == 1
        (address, nbytes, _), key = map(int, local[0]), remote[0]
        place = slice(address - 1000, address - 1000 + nbytes)
        if self.good and op == "READ":
            found = self.objects[key][:nbytes]
            self.memory[place.start : place.start + len(found)] = found
        elif self.good:
            self.objects[key] = bytes(self.memory[place])
        self.under_way.append(lambda: done(self.good, "" if self.good else "NIXL_ERR_BACKEND"))

    def close(self):
        self.under_way.clear()


class FakeOther(object_data.Data):
    def __init__(self, trouble=None):
        self.asked, self.trouble = [], trouble

    def get(self, key, first, nbytes, deadline, done):
        self.asked.append(("get", key, first, nbytes))
        done(self.trouble)

    def put(self, key, first, nbytes, done):
        self.asked.append(("put", key, first, nbytes))
        done(self.trouble)

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def obj():
    memory = bytearray(1 << 14)
    pool = SimpleNamespace(view=memoryview(memory), address=1000)
    agent, other = FakeAgent(memory), FakeOther()
    data = object_data.NixlData(SimpleNamespace(pool=pool), agent, other)
    told = []

    def settle():
        agent.under_way.pop()()
        return told.pop()

    def put(key, first, nbytes):
        data.put(key, first, nbytes, told.append)
        return settle()

    def get(key, first, nbytes):
        data.get(key, first, nbytes, math.inf, told.append)
        return settle()

    return SimpleNamespace(data=data, agent=agent, other=other, memory=memory, put=put, get=get, told=told)


def test_s3_nixl_obj_detects_short_objects(obj):
    obj.memory[4096:8192] = bytes(range(256)) * 16
    assert obj.put("k", 4096, 4096) is None and obj.agent.objects["k"] == obj.memory[4096:8192]
    assert obj.get("k", 8192, 4096) is None and obj.memory[8192:12288] == obj.memory[4096:8192]
    for short in (0, 1, 4095, 4096 - object_data.SENTINEL_BYTES):
        obj.agent.objects["short"] = bytes(short)
        trouble = obj.get("short", 8192, 4096)
        # What lacks a few of the last bytes differs from the sentinel and is the checksum's to find.
        assert (trouble is None) == (short == 4095)
        assert trouble is None or trouble.kind is Kind.ABSENT
    assert not obj.other.asked


def test_s3_falls_back_to_boto3_with_reason(obj):
    obj.agent.good = False
    assert obj.get("k", 4096, 4096) is None and obj.put("k", 4096, 4096) is None
    assert obj.other.asked == [("get", "k", 4096, 4096), ("put", "k", 4096, 4096)]
    obj.other.trouble = Trouble("because", Kind.FORBIDDEN)
    assert obj.put("k", 4096, 4096) is obj.other.trouble
    obj.other.trouble = None
    for _ in range(object_data.MAX_FAILURES):
        obj.get("k", 4096, 4096) if obj.data._failures < object_data.MAX_FAILURES else None
    obj.data.get("k", 4096, 4096, math.inf, obj.told.append)
    obj.data.put("k", 4096, 4096, obj.told.append)
    assert not obj.agent.under_way and obj.told == [None, None], "it is not asked any more"
    obj.data.close()
    assert obj.other.asked[-1] == "closed"


def test_s3_nixl_backend_without_credentials(bucket):
    params = object_data.obj_params(bucket)
    assert params["bucket"] == "bucket" and params["endpoint_override"] == bucket.endpoint
    assert params["scheme"] == "http" and params["region"] == "eu-west-1" and "ca_bundle" not in params
    assert not {"access_key", "secret_key", "session_token"} & set(params)
    assert not any(secret in str(params) for secret in (KEY_ID, SECRET, TOKEN))
    amazon = Bucket(parse_url("s3://bucket/x"), "", "eu-west-1", timeout=1.0, connections=1)
    assert not {"endpoint_override", "scheme"} & set(object_data.obj_params(amazon))


def test_s3_missing_library_raises_with_install_hint(monkeypatch):
    monkeypatch.setattr(object_data, "LIBRARY", "libno-such-thing.so.1")
    with pytest.raises(KVTierError, match=r"libno-such-thing.so.1.*install"):
        object_data.load_library()


def test_s3_library_loggers_stay_at_warning():
    logging.getLogger("botocore").setLevel(logging.DEBUG)
    Bucket(parse_url("s3://bucket/x"), "http://127.0.0.1:9", "eu-west-1", timeout=1.0, connections=1)
    for name in ("boto3", "botocore", "urllib3"):
        assert logging.getLogger(name).level == logging.WARNING
