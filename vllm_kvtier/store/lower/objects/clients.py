"""An S3 bucket through boto3: blocking requests, each with its deadline, for the threads of ``object_mover``.

Credentials come from where boto3 looks for them (AWS_* variables, profiles, the machine's role) and stay there: no
exception's own text leaves this module, because servers and libraries put what they like into it. What went wrong is
said in words of ours, made of the error's class or S3's error code.
"""

import enum
import functools
import logging
import re
import time
from typing import Any

try:
    import boto3
    from botocore import exceptions as be
    from botocore.config import Config
except ImportError as error:
    raise ImportError(f"{error}; `pip install vllm-kvtier[object]`") from error

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.lower.objects.names import Place

CHUNK = 256 << 10  # bytes read between two looks at the deadline
SEND = 1 << 20  # bytes handed to the socket at once
MOST_CONNECT = 2.0  # seconds
ATTEMPTS = 2  # of a request, by boto3; the tier itself tries again later


class Kind(enum.Enum):
    ABSENT = "absent"  # no such object
    FORBIDDEN = "forbidden"  # or, where the bucket may not be listed, absent
    DENIED = "denied"  # credentials are missing, wrong or expired
    FAILED = "failed"  # anything else


class Trouble(KVTierError):
    """A request that was not answered as it should be; its text is fit for logs."""

    def __init__(self, words: str, kind: Kind = Kind.FAILED):
        super().__init__(words)
        self.kind = kind


class Bucket:
    """Requests for objects of one bucket; any thread. All of them raise Trouble, and end ``timeout`` seconds after
    the server last sent anything at the latest (times ATTEMPTS, before its first answer).

    endpoint, region: "" as boto3 finds them. connections: how many requests may be under way.
    """

    def __init__(self, place: Place, endpoint: str, region: str, *, timeout: float, connections: int):
        for name in ("boto3", "botocore", "urllib3"):  # at DEBUG they log headers, and tokens among them
            logging.getLogger(name).setLevel(logging.WARNING)
        self.place = place
        # Who may not list a bucket is told that missing objects are forbidden; ``object_mover`` finds out.
        self.denied_is_absent = False
        config = Config(
            connect_timeout=min(MOST_CONNECT, timeout),
            read_timeout=timeout,
            retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
            max_pool_connections=connections,
            # Blocks carry checksums of their own, and not every S3 understands these.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # TLS protects what is sent already; without it the signature covers the contents.
            s3=None if endpoint.startswith("http:") else {"payload_signing_enabled": False},
        )
        self._client = _told(
            lambda: boto3.session.Session().client(
                "s3", endpoint_url=endpoint or None, region_name=region or None, config=config
            ),
            place,
        )
        # botocore would ask before it sends each object, and wait a second where the server does not answer that.
        self._client.meta.events.register_last("before-call.s3", _expect_nothing)

    @property
    def endpoint(self) -> str:
        return self._client.meta.endpoint_url

    @property
    def at_amazon(self) -> bool:
        return ".amazonaws.com" in self.endpoint

    @property
    def region(self) -> str:
        return self._client.meta.region_name

    @property
    def virtual_addressing(self) -> bool:
        return (self._client.meta.config.s3 or {}).get("addressing_style") == "virtual"

    def size(self, key: str) -> int | None:
        """In bytes; None: no such object."""
        try:
            return int(self._ask(self._client.head_object, key)["ContentLength"])
        except Trouble as trouble:
            if trouble.kind is Kind.ABSENT or trouble.kind is Kind.FORBIDDEN and self.denied_is_absent:
                return None
            raise

    def get(self, key: str, into: memoryview, deadline: float) -> None:
        """The whole object, which must be as long as ``into`` (else Kind.ABSENT: no use to anybody); by
        time.monotonic() ``deadline``. Nobody writes ``into`` after this."""
        body = None
        try:
            reply = self._ask(self._client.get_object, key)
            body = reply["Body"]
            if int(reply["ContentLength"]) != len(into):
                raise Trouble(f"{reply['ContentLength']} bytes in an object that should have {len(into)}", Kind.ABSENT)
            _told(functools.partial(_receive, body, into, deadline), self.place)
        except Trouble as trouble:
            if trouble.kind is Kind.FORBIDDEN and self.denied_is_absent:
                raise Trouble("the object is not there", Kind.ABSENT) from None
            raise
        finally:
            if body is not None:
                body.close()

    def put(self, key: str, data: memoryview) -> None:
        self._ask(self._client.put_object, key, Body=_Body(data))

    def delete(self, key: str) -> None:
        """What is not there is deleted already."""
        self._ask(self._client.delete_object, key)

    def read(self, key: str, most: int) -> bytes:
        """The first ``most`` bytes."""
        body = self._ask(self._client.get_object, key)["Body"]
        try:
            return _told(lambda: body.read(most), self.place)
        finally:
            body.close()

    def _ask(self, call: Any, key: str, **parameters: Any) -> dict:
        return _told(lambda: call(Bucket=self.place.bucket, Key=key, **parameters), self.place)

    def __repr__(self) -> str:
        return f"Bucket({self.place})"


class _Body:
    """What boto3 takes for a file, over memory that it need not copy."""

    def __init__(self, data: memoryview):
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """More than was asked for, up to SEND: urllib3 asks for 16 KiB and sends whatever it gets in one call."""
        end = len(self._data) if size < 0 else self._at + max(size, SEND)
        part = self._data[self._at : end]
        self._at += len(part)
        return part

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at


def _expect_nothing(params: dict, **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _receive(body: Any, into: memoryview, deadline: float) -> None:
    at = 0
    while at < len(into):
        if time.monotonic() > deadline:
            raise Trouble("reading an object took too long")
        size = body.readinto(into[at : at + CHUNK])
        if not size:
            raise Trouble(f"the object ended after {at} of {len(into)} bytes", Kind.ABSENT)
        at += size


# -- errors in words ----------------------------------------------------------------------------------------------

_CREDENTIALS = (
    "credentials for it were not found or are incomplete; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, or give the machine a role"
)
_CODES = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "access denied: the credentials lack the right to do this",
    "InvalidAccessKeyId": "it does not know the access key",
    "SignatureDoesNotMatch": "the secret key is not the one that belongs to the access key",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "PermanentRedirect": "the bucket is in another region; set object_region",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set object_region",
    "IllegalLocationConstraintException": "the bucket is in another region; set object_region",
    "QuotaExceeded": "its quota is used up",
    "XMinioStorageFull": "it is full",
    "SlowDown": "it asks for fewer requests",
}
_DENIED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")


def _told(call: Any, place: Place) -> Any:
    """``call()``, whose exceptions become Trouble."""
    try:
        return call()
    except Trouble:
        raise
    except be.ClientError as error:
        trouble = _answered(error, place)
    except Exception as error:
        trouble = _unanswered(error, place)
    raise trouble  # outside of ``except``: no traceback may bring the original's text with it


def _answered(error: be.ClientError, place: Place) -> Trouble:
    code = str(error.response.get("Error", {}).get("Code", ""))
    code = code if _CODE.fullmatch(code) else "no code"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchKey" or status == 404 and code == "404":
        return Trouble("the object is not there", Kind.ABSENT)
    kind = Kind.DENIED if code in _DENIED or status == 401 else Kind.FORBIDDEN if status == 403 else Kind.FAILED
    words = _CODES.get(code)
    if words is None:
        words = "it fails" if status >= 500 else "it refuses a request" if kind is Kind.FAILED else "access denied"
    return Trouble(f"the object store of {place}: {words} ({code}, HTTP {status})", kind)


def _unanswered(error: Exception, place: Place) -> Trouble:
    kind = Kind.FAILED
    if isinstance(error, (be.NoCredentialsError, be.PartialCredentialsError, be.CredentialRetrievalError)):
        words, kind = _CREDENTIALS, Kind.DENIED
    elif isinstance(error, be.ProfileNotFound):
        words, kind = "the profile in AWS_PROFILE does not exist", Kind.DENIED
    elif isinstance(error, be.NoRegionError):
        words = "its region is not known; set object_region"
    elif isinstance(error, (be.SSLError,)):
        words = "its certificate is not trusted; AWS_CA_BUNDLE names a file of certificates that are"
    elif isinstance(error, (be.ConnectTimeoutError, be.ReadTimeoutError)):
        words = "no answer in time"
    elif isinstance(error, (be.EndpointConnectionError, be.ProxyConnectionError)):
        words = "it cannot be reached"
    elif isinstance(error, (be.HTTPClientError, be.IncompleteReadError, OSError)):
        words = "the connection broke"
    else:
        words = "boto3 cannot ask it"
    return Trouble(f"the object store of {place}: {words} ({type(error).__name__})", kind)
