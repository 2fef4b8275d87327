"""An S3 bucket through boto3: blocking requests with deadlines, for the threads of the object tier's process.

boto3 finds the credentials (AWS_* variables, profiles, the machine's role). The text of its exceptions never leaves
this module, because it may contain anything. Messages are made from the error's class or S3's error code instead.
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
from vllm_kvtier.store.tiers.objects.object_names import ObjectLocation

CHUNK_BYTES = 256 << 10  # bytes read between two checks of the deadline
SEND_BYTES = 1 << 20  # bytes written to the socket at once
MAX_CONNECT_SECONDS = 2.0
MAX_ATTEMPTS = 2  # of a request, by boto3; the tier retries later


class Kind(enum.Enum):
    ABSENT = "absent"  # no such object
    FORBIDDEN = "forbidden"  # or absent, if the bucket may not be listed
    DENIED = "denied"  # credentials are missing, wrong or expired
    FAILED = "failed"  # anything else


class Trouble(KVTierError):
    """A failed request; its text may be logged."""

    def __init__(self, text: str, kind: Kind = Kind.FAILED):
        super().__init__(text)
        self.kind = kind


class Bucket:
    """Requests to one bucket, from any thread. They raise Trouble. A request ends at the latest ``timeout`` seconds
    after the server last sent anything (before its first answer, MAX_ATTEMPTS times that).

    endpoint, region: "": boto3 finds them. connections: maximum number of parallel requests.
    """

    def __init__(self, location: ObjectLocation, endpoint: str, region: str, *, timeout: float, connections: int):
        for name in ("boto3", "botocore", "urllib3"):  # at DEBUG they log headers, and tokens among them
            logging.getLogger(name).setLevel(logging.WARNING)
        self.location = location
        # Without the right to list the bucket, S3 reports a missing object as forbidden. ObjectProcess sets it.
        self.denied_is_absent = False
        config = Config(
            connect_timeout=min(MAX_CONNECT_SECONDS, timeout),
            read_timeout=timeout,
            retries={"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"},
            max_pool_connections=connections,
            # Blocks have their own checksums, and not every S3 server supports these.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # TLS protects the payload; without TLS the signature covers it.
            s3=None if endpoint.startswith("http:") else {"payload_signing_enabled": False},
        )
        self._client = _explained(
            lambda: boto3.session.Session().client(
                "s3", endpoint_url=endpoint or None, region_name=region or None, config=config
            ),
            location,
        )
        # Without "Expect: 100-continue", for which botocore waits a second if the server ignores it.
        self._client.meta.events.register_last("before-call.s3", _expect_nothing)

    @property
    def endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)

    @property
    def at_amazon(self) -> bool:
        return ".amazonaws.com" in self.endpoint

    @property
    def region(self) -> str:
        return str(self._client.meta.region_name or "")

    @property
    def virtual_addressing(self) -> bool:
        return (self._client.meta.config.s3 or {}).get("addressing_style") == "virtual"

    def size(self, key: str) -> int | None:
        """In bytes; None: no such object."""
        try:
            return int(self._ask(self._client.head_object, key)["ContentLength"])
        except Trouble as trouble:
            if trouble.kind is Kind.ABSENT or (trouble.kind is Kind.FORBIDDEN and self.denied_is_absent):
                return None
            raise

    def get(self, key: str, into: memoryview, deadline: float) -> None:
        """Read the whole object by time.monotonic() ``deadline``. Kind.ABSENT if its length is not that of ``into``,
        because it is useless then. ``into`` is not written after this returns."""
        body = None
        try:
            reply = self._ask(self._client.get_object, key)
            body = reply["Body"]
            if int(reply["ContentLength"]) != len(into):
                raise Trouble(f"{reply['ContentLength']} bytes in an object that should have {len(into)}", Kind.ABSENT)
            _explained(functools.partial(_receive, body, into, deadline), self.location)
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
        """Delete the object, if it exists."""
        self._ask(self._client.delete_object, key)

    def read(self, key: str, max_bytes: int) -> bytes:
        """The first ``max_bytes`` bytes."""
        body = self._ask(self._client.get_object, key)["Body"]
        try:
            return bytes(_explained(lambda: body.read(max_bytes), self.location))
        finally:
            body.close()

    def _ask(self, call: Any, key: str, **parameters: Any) -> Any:
        return _explained(lambda: call(Bucket=self.location.bucket, Key=key, **parameters), self.location)


class _Body:
    """A file-like view of memory for boto3, without a copy."""

    def __init__(self, data: memoryview):
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """Up to SEND_BYTES even if fewer are requested: urllib3 requests 16 KiB and sends all it gets in one call."""
        end = len(self._data) if size < 0 else self._at + max(size, SEND_BYTES)
        part = self._data[self._at : end]
        self._at += len(part)
        return part

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at


def _expect_nothing(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _receive(body: Any, into: memoryview, deadline: float) -> None:
    at = 0
    while at < len(into):
        if time.monotonic() > deadline:
            raise Trouble("reading an object took too long")
        size = body.readinto(into[at : at + CHUNK_BYTES])
        if not size:
            raise Trouble(f"the object ended after {at} of {len(into)} bytes", Kind.ABSENT)
        at += size


# -- error messages -----------------------------------------------------------------------------------------------

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


def _explained(call: Any, location: ObjectLocation) -> Any:
    """Return ``call()``; its exceptions become Trouble."""
    try:
        return call()
    except Trouble:
        raise
    except be.ClientError as error:
        trouble = _answered(error, location)
    except Exception as error:
        trouble = _unanswered(error, location)
    raise trouble  # outside of ``except``, so that no traceback contains the original's text


def _answered(error: be.ClientError, location: ObjectLocation) -> Trouble:
    code = str(error.response.get("Error", {}).get("Code", ""))
    code = code if _CODE.fullmatch(code) else "no code"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchKey" or (status == 404 and code == "404"):
        return Trouble("the object is not there", Kind.ABSENT)
    kind = Kind.DENIED if code in _DENIED or status == 401 else Kind.FORBIDDEN if status == 403 else Kind.FAILED
    text = _CODES.get(code)
    if text is None:
        text = "it fails" if status >= 500 else "it refuses a request" if kind is Kind.FAILED else "access denied"
    return Trouble(f"the object store of {location}: {text} ({code}, HTTP {status})", kind)


def _unanswered(error: Exception, location: ObjectLocation) -> Trouble:
    kind = Kind.FAILED
    if isinstance(error, (be.NoCredentialsError, be.PartialCredentialsError, be.CredentialRetrievalError)):
        text, kind = _CREDENTIALS, Kind.DENIED
    elif isinstance(error, be.ProfileNotFound):
        text, kind = "the profile in AWS_PROFILE does not exist", Kind.DENIED
    elif isinstance(error, be.NoRegionError):
        text = "its region is not known; set object_region"
    elif isinstance(error, be.SSLError):
        text = "its certificate is not trusted; set AWS_CA_BUNDLE to a file with its authority's certificate"
    elif isinstance(error, (be.ConnectTimeoutError, be.ReadTimeoutError)):
        text = "no answer in time"
    elif isinstance(error, (be.EndpointConnectionError, be.ProxyConnectionError)):
        text = "it cannot be reached"
    elif isinstance(error, (be.HTTPClientError, be.IncompleteReadError, OSError)):
        text = "the connection broke"
    else:
        text = "boto3 failed"
    return Trouble(f"the object store of {location}: {text} ({type(error).__name__})", kind)
