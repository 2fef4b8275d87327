"""Requests to objects through obstore, and what its errors become: messages without anything that a server sent."""

import http.server
import itertools
import math
import os
import pwd
import ssl
import sys
import threading
from types import SimpleNamespace

import pytest
from proxy_authority import Authority

from vllm_kvtier.store.tiers.objects import object_client
from vllm_kvtier.store.tiers.objects.object_client import PART_BYTES, ObjectClient
from vllm_kvtier.store.tiers.objects.object_errors import explain
from vllm_kvtier.store.tiers.objects.object_names import parse_url
from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

KEY_ID, SECRET, TOKEN = "AKIAUNITTESTKEY", "unit/test/secret+of+forty+characters", "session-token-of-a-test"
CLOUDS = ("s3://bucket/x", "gs://bucket/x", "az://bucket/x")


class Server:
    """Answers all requests as ``reply`` says: (status, headers, body). ``seen``: (method, path, headers)."""

    def __init__(self):
        self.reply, self.seen = (200, {}, b""), []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                outer.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.seen.append((self.command, self.path, dict(self.headers)))
                status, headers, body = outer.reply
                if asked := self.headers.get("Range") if status == 200 else None:
                    first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
                    headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"}
                    status, body = 206, body[first : last + 1]
                self.send_response(status)
                standard = {
                    "Content-Length": str(len(body)),
                    "ETag": '"e"',
                    "Last-Modified": self.date_time_string(1e9),
                }
                for name, value in {**standard, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                self.close_connection = headers.get("Connection") == "close"

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

            def log_message(self, *arguments):
                """Quiet."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def error(self, status, code):
        """A server that repeats all that it was sent."""
        said = f"{KEY_ID} {SECRET} {TOKEN}"
        body = f"<Error><Code>{code}</Code><Message>{said}</Message><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId></Error>"
        self.reply = status, {"Content-Type": "application/xml"}, body.encode()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, server):
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or "proxy" in name.lower():
            monkeypatch.delenv(name)
    server.seen.clear()
    server.reply = 200, {}, b""
    # The tests are about the message in the end, not about how often it is tried.
    monkeypatch.setattr(object_client, "MAX_RETRIES", 0)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")


def client_of(url: str, endpoint: str, timeout: float = 1.0, seconds: float = 5.0) -> ObjectClient:
    return ObjectClient(parse_url(url), endpoint, "eu-west-1" if url.startswith("s3") else "", timeout, seconds)


@pytest.fixture
def client(server):
    return client_of("s3://bucket/x", server.endpoint)


def trouble_of(call) -> Trouble:
    """Its trouble, after a look at all that a log with tracebacks would show of it."""
    with pytest.raises(Trouble) as caught:
        call()
    trouble = caught.value
    assert trouble.__cause__ is None and isinstance(trouble.__context__, (Trouble, type(None)))
    assert "\n" not in str(trouble) and len(str(trouble)) < 250
    for secret in (KEY_ID, SECRET, TOKEN, "127.0.0.1"):
        assert secret not in repr(trouble)
    return trouble


@pytest.mark.parametrize("url", CLOUDS)
@pytest.mark.parametrize(
    "status, code, kind, words",
    [
        (403, "AccessDenied", Kind.FORBIDDEN, "lack the right"),
        (403, "InvalidAccessKeyId", Kind.DENIED, "does not know the access key"),
        (403, "SignatureDoesNotMatch", Kind.DENIED, "secret key"),
        (403, "AuthenticationFailed", Kind.DENIED, "key is wrong"),
        (401, "Unheard", Kind.DENIED, "access denied (Unheard, HTTP 401)"),
        (400, "ExpiredToken", Kind.DENIED, "expired"),
        (404, "NoSuchBucket", Kind.FAILED, "no such"),
        (404, "ContainerNotFound", Kind.FAILED, "no such"),
        (404, "NoSuchKey", Kind.ABSENT, "not there"),
        (404, "BlobNotFound", Kind.ABSENT, "not there"),
        (400, "IllegalLocationConstraintException", Kind.FAILED, "another region"),
        (500, "InternalError", Kind.PASSING, "it fails (InternalError, HTTP 500)"),
        (503, "SlowDown", Kind.THROTTLED, "fewer requests"),
        (429, "TooMany", Kind.THROTTLED, "fewer requests"),
        (507, "XMinioStorageFull", Kind.FULL, "full"),
        (507, KEY_ID + " <b>", Kind.FULL, "it is full (no code, HTTP 507)"),
        (400, "RequestTimeout", Kind.PASSING, "no data in time"),
        (408, "Unheard", Kind.PASSING, "it fails"),
        (418, "Teapot", Kind.FAILED, "refuses"),
    ],
)
def test_object_store_errors_are_translated(server, url, status, code, kind, words):
    server.error(status, code.replace("<", "&lt;"))
    client = client_of(url, server.endpoint)
    into = memoryview(bytearray(10))
    for call in (lambda: client.get("k", into, math.inf), lambda: client.read("k", 9)):
        trouble = trouble_of(call)
        assert trouble.kind is kind and words in str(trouble)
    trouble = trouble_of(lambda: client.put("k", into))
    if kind is Kind.ABSENT:  # what is missing must be the bucket
        kind, words = Kind.FAILED, "there is no such bucket"
    assert trouble.kind is kind and words in str(trouble)


@pytest.mark.parametrize(
    "location, endpoint, url",
    [
        ("s3://metadata/identity", "http://minio:9000", "http://minio:9000/metadata/identity/.kvtier"),
        ("s3://latest/meta-data", "http://minio:9000/", "http://minio:9000/latest/meta-data/.kvtier"),
        ("s3://blocks", "http://169.254.20.10:9000", "http://169.254.20.10:9000/blocks/.kvtier"),
        ("s3://blocks", "http://minio:9000", "http://minio:9000/blocks//sts.eu-west-1.amazonaws.com/.kvtier"),
        ("s3://latest/meta-data", "", "https://s3.eu-west-1.amazonaws.com/latest/meta-data/.kvtier"),
        ("s3://bucket/latest", "", "https://bucket.s3.amazonaws.com/latest/meta-data/.kvtier"),
        ("gs://metadata/identity", "", "https://storage.googleapis.com/metadata/identity/.kvtier"),
        ("az://metadata/identity", "", "https://account.blob.core.windows.net/metadata/identity/.kvtier"),
    ],
)
def test_objects_whose_urls_look_like_those_for_credentials_are_absent(location, endpoint, url):
    error = FileNotFoundError(f"Error performing GET {url} in 2ms - status code: 404 Not Found: ")
    assert explain(error, parse_url(location), endpoint).kind is Kind.ABSENT


def test_object_client_knows_its_endpoint_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    server.error(404, "NoSuchKey")
    assert client_of("s3://metadata/identity", "").size("identity/.kvtier") is None


@pytest.mark.parametrize("name", ["llm-meta-data/kv", "oauth2-cache/kv", "bucket/kv-meta-data", "sts.example/login"])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_names_with_words_of_credential_services_are_no_requests_for_credentials(server, scheme, name):
    client = client_of(f"{scheme}://{name}", server.endpoint)
    server.error(404, "NoSuchKey")
    assert client.size(f"{client.location.prefix}/oauth2/token") is None
    assert trouble_of(lambda: client.read(f"{client.location.prefix}/meta-data/k", 9)).kind is Kind.ABSENT


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
        "http://[fd00:ec2::254]/latest/api/token",
        "http://localhost:1338/latest/api/token",
        "https://sts.eu-west-1.amazonaws.com/?Action=AssumeRoleWithWebIdentity",
        "https://oauth2.googleapis.com/token",
        "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token",
        "https://login.microsoftonline.com/tenant/oauth2/v2.0/token",
        "http://169.254.169.254/metadata/identity/oauth2/token",
    ],
)
def test_requests_for_credentials_are_known_by_their_urls(url):
    error = Exception(f"Generic S3 error: Error performing PUT {url} in 2s, after 0 retries - status code: 404")
    assert explain(error, parse_url("s3://bucket/x")).kind is Kind.DENIED


def test_write_that_conflicts_with_another_one_has_failed(server, client):
    server.error(409, "OperationAborted")
    assert trouble_of(lambda: client.put("k", memoryview(b"x"))).kind is Kind.PASSING


@pytest.mark.parametrize("code", ["OperationAborted", "ConditionalRequestConflict"])
def test_object_that_another_node_is_writing_is_taken_for_written(server, client, code):
    """Its content is the same. As a failure it would end the batch, and four in a row the tier."""
    for status, name in ((409, code), (412, "PreconditionFailed"), (409, "BlobAlreadyExists")):
        server.error(status, name)
        assert not client.put("k", memoryview(b"x"), create=True)


def test_missing_object_without_list_permission_is_absent(server, client):
    server.reply = 403, {}, b""
    assert trouble_of(lambda: client.size("k")).kind is Kind.FORBIDDEN
    client.denied_is_absent = True
    assert client.size("k") is None
    server.error(403, "AccessDenied")
    assert trouble_of(lambda: client.get("k", memoryview(bytearray(9)), math.inf)).kind is Kind.ABSENT
    server.error(403, "InvalidAccessKeyId")
    assert trouble_of(lambda: client.get("k", memoryview(bytearray(9)), math.inf)).kind is Kind.DENIED
    server.reply = 404, {}, b""
    assert client.size("k") is None
    client.delete("k")


def test_object_of_another_length_is_absent_and_partial_body_an_error(server, client):
    data = bytes(range(256)) * 4096
    into = memoryview(bytearray(len(data)))
    server.reply = 200, {}, data
    assert client.get("k", into, math.inf) == 1e9
    assert into == data and client.size("k") == len(data)
    assert client.read("k", len(data)) == data and client.read("k", 9) == b""
    before = bytes(into)
    for other in (data[:-1], b"", data + b"x"):
        server.reply = 200, {}, other
        assert trouble_of(lambda: client.get("k", into, math.inf)).kind is Kind.ABSENT
    # It says that it sends all, and stops.
    server.reply = 200, {"Content-Length": str(len(data)), "Connection": "close"}, data[:1000]
    assert "broke" in str(trouble_of(lambda: client.get("k", into, math.inf)))
    server.reply = 200, {"Content-Length": str(len(data))}, data[:1000]
    assert "no answer in time" in str(trouble_of(lambda: client.get("k", into, math.inf)))
    assert into == before, "nothing of a failed read arrives"
    server.reply = 200, {}, data
    assert "too long" in str(trouble_of(lambda: client.get("k", into, 0.0)))


def test_large_object_is_read_in_ranges_and_small_one_is_not(server, client):
    data = os.urandom(2 * PART_BYTES + 4096)
    server.reply = 200, {}, data
    into = memoryview(bytearray(len(data)))
    client.get("k", into, math.inf)
    assert into == data
    asked = [headers.get("range") or headers.get("Range") for _, _, headers in server.seen]
    ends = (0, PART_BYTES, 2 * PART_BYTES, len(data))
    assert asked == [f"bytes={first}-{end - 1}" for first, end in itertools.pairwise(ends)]
    server.seen.clear()
    server.reply = 200, {}, data[:4096]
    client.get("k", into[:4096], math.inf)
    assert not any("range" in map(str.lower, headers) for _, _, headers in server.seen)


def test_put_sends_the_bytes_in_one_request(server, client):
    data = memoryview(bytes(range(256)) * 12345)
    assert client.put("k", data)
    method, path, headers = server.seen[-1]
    assert (method, path) == ("PUT", "/bucket/k") and server.body == data
    assert "if-none-match" not in map(str.lower, headers)
    client.delete("k")
    assert server.seen[-1][:2] == ("DELETE", "/bucket/k")
    assert not any("list" in path or path.endswith("/bucket") for _, path, _ in server.seen)


def test_create_is_conditional_where_the_store_can(server, client):
    data = memoryview(b"x" * 100)
    assert client.put("k", data, create=True)
    assert {name.lower(): value for name, value in server.seen[-1][2].items()}["if-none-match"] == "*"
    server.error(412, "PreconditionFailed")
    assert not client.put("k", data, create=True)
    server.error(501, "NotImplemented")
    assert "it fails" in str(trouble_of(lambda: client.put("k", data, create=True)))
    server.reply = 200, {}, b""
    server.seen.clear()
    assert client.put("k", data, create=True), "this store cannot, and is not asked to again"
    assert "if-none-match" not in map(str.lower, server.seen[-1][2])


def test_object_store_without_server(client):
    assert "cannot be reached" in str(trouble_of(lambda: client_of("s3://bucket/x", "http://localhost:9").size("k")))


def test_certificate_of_aws_ca_bundle_is_trusted(monkeypatch, tmp_path):
    server = Server()
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    server.reply = 200, {}, b"12345"
    endpoint = server.endpoint.replace("http:", "https:")
    try:
        assert "certificate is not trusted" in str(trouble_of(lambda: client_of("s3://bucket/x", endpoint).size("k")))
        monkeypatch.setenv("AWS_CA_BUNDLE", authority.ca_file)
        client = client_of("s3://bucket/x", endpoint)
        assert client.size("k") == 5
        client.put("k", memoryview(b"x"))
        signed = {name.lower(): value for name, value in server.seen[-1][2].items()}["x-amz-content-sha256"]
        assert signed == "UNSIGNED-PAYLOAD", "TLS protects it"
    finally:
        server.http.shutdown()
        server.http.server_close()


def test_profiles_need_boto3_and_must_exist(monkeypatch, server):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    trouble = trouble_of(lambda: client_of("s3://bucket/x", server.endpoint))
    assert trouble.kind is Kind.DENIED and "AWS_PROFILE does not exist" in str(trouble)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    assert "pip install boto3" in str(trouble_of(lambda: client_of("s3://bucket/x", server.endpoint)))


def test_missing_file_of_certificates_is_named(monkeypatch, server):
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/file.pem")
    trouble = trouble_of(lambda: client_of("s3://bucket/x", server.endpoint))
    assert trouble.kind is Kind.DENIED and "AWS_CA_BUNDLE, /no/such/file.pem" in str(trouble)


def test_client_is_made_for_a_user_without_a_home(monkeypatch, server):
    """As a container's may be: pathlib raises RuntimeError there."""

    def getpwuid(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    server.reply = 200, {}, b"12345"
    assert client_of("s3://bucket/x", server.endpoint).size("k") == 5


def test_credentials_of_a_profile_are_used(monkeypatch, server, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(f"[kv]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "kv")
    server.reply = 200, {}, b"12345"
    assert ObjectClient(parse_url("s3://bucket/x"), server.endpoint, "", 1.0, 5.0).size("k") == 5
    signed = {name.lower(): value for name, value in server.seen[-1][2].items()}["authorization"]
    assert f"Credential={KEY_ID}/" in signed and "/eu-north-1/s3/" in signed


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x"])
def test_missing_credentials_are_reported_with_the_variables_to_set(monkeypatch, server, url):
    """The machine's metadata service, which is asked last, has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_BEARER_TOKEN"):
        monkeypatch.delenv(name)
    server.reply = 403, {}, b""
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.endpoint)
    trouble = trouble_of(lambda: client_of(url, server.endpoint).put("k", memoryview(b"x")))
    assert trouble.kind is Kind.DENIED and ("AWS_PROFILE" if url[0] == "s" else "GOOGLE_APPLICATION") in str(trouble)


# -- a directory ----------------------------------------------------------------------------------------------------


def test_directory_errors_are_translated(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/kv"
    assert "no directory" in str(trouble_of(lambda: client_of(url, "")))
    (tmp_path / "kv").mkdir()
    client = client_of(url, "")
    data = memoryview(b"x" * 4096)
    assert client.put("a/b", data, create=True) and client.size("a/b") == 4096 and client.size("a/c") is None
    into = memoryview(bytearray(4096))
    modified = os.stat(tmp_path / "kv/a/b").st_mtime
    assert client.get("a/b", into, math.inf) == pytest.approx(modified, abs=1e-3) and into == data
    assert trouble_of(lambda: client.get("a/b", into[:100], math.inf)).kind is Kind.ABSENT
    assert trouble_of(lambda: client.get("a/c", into, math.inf)).kind is Kind.ABSENT
    client.delete("a/b")
    client.delete("a/b")

    def fail(number):
        def put(*arguments, **options):
            raise RuntimeError(f"Generic LocalFileSystem error: Unable to open /secret (os error {number})\n\nDebug")

        monkeypatch.setattr(object_client, "obstore", SimpleNamespace(put=put))
        return trouble_of(lambda: client.put("k", data))

    kinds = {28: Kind.FULL, 122: Kind.FULL, 13: Kind.FORBIDDEN, 30: Kind.FORBIDDEN, 5: Kind.PASSING}
    for number, kind in kinds.items():
        trouble = fail(number)
        assert trouble.kind is kind and os.strerror(number) in str(trouble) and "secret" not in str(trouble)
    assert "no such" in str(fail(116)), "ESTALE"
    assert explain(OSError("(os error 116)"), client.location).kind is Kind.ABSENT, "of a read: another node removed it"
