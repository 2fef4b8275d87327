"""Objects in a bucket or directory, through obstore: blocking requests with deadlines, from any thread.

obstore finds credentials where each cloud's own tools do. Only for profiles of AWS it needs boto3.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

try:
    import obstore
    from obstore import store as stores
    from obstore.exceptions import AlreadyExistsError
except ImportError as error:
    raise ImportError(f"{error}; `pip install vllm-kvtier[object]`") from error

from vllm_kvtier.store.tiers.objects.object_errors import explain
from vllm_kvtier.store.tiers.objects.object_names import ObjectLocation
from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

T = TypeVar("T")

MAX_CONNECT_SECONDS = 2.0
MAX_RETRIES = 1  # of a request, if it failed early; the tier retries later
PART_BYTES = 16 << 20  # of a request; larger objects are read and written in parts
_ENDPOINTS = {  # by scheme: obstore's name of it, and the variables for it
    "s3": ("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("base_url", "GOOGLE_BASE_URL"),
    "az": ("endpoint", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CLASSES = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
_AWS_VARIABLES = {
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}


class ObjectClient:
    """Requests to the objects of one location. They raise Trouble.

    endpoint, region: "": obstore finds them. timeout: seconds in which a server must send something of what is read.
    transfer_seconds: of one request in all. A request that failed within ``timeout`` is repeated once.
    """

    def __init__(self, location: ObjectLocation, endpoint: str, region: str, timeout: float, transfer_seconds: float):
        self.location = location
        self._endpoint = endpoint = endpoint or _endpoint_of(location)
        # Without the right to list the bucket, a missing object is reported as forbidden. ObjectProcess sets it.
        self.denied_is_absent = False
        # A rename does not need it, and not every file system has the links by which obstore does it.
        self._creates = location.scheme != "file"
        limits = {"connect_timeout": min(MAX_CONNECT_SECONDS, timeout), "timeout": transfer_seconds}
        # The time to read counts from the request's first byte: it would end uploads.
        self._writer: Any = self._explained(lambda: _open(location, endpoint, region, limits, timeout))
        limits["read_timeout"] = timeout
        self._reader: Any = self._explained(lambda: _open(location, endpoint, region, limits, timeout))

    def size(self, key: str) -> int | None:
        """In bytes; None: no such object."""
        try:
            return int(self._explained(lambda: obstore.head(self._reader, key))["size"])
        except Trouble as trouble:
            if self._absent(trouble):
                return None
            raise

    def get(self, key: str, into: memoryview, deadline: float) -> float:
        """Read the whole object by time.monotonic() ``deadline``; return when it was last modified, in seconds since
        the epoch. Kind.ABSENT if its length is not that of ``into``, because it is useless then. ``into`` is not
        written after this returns."""
        modified = 0.0
        for start in range(0, len(into), PART_BYTES):
            if time.monotonic() > deadline:
                raise Trouble("reading an object took too long", Kind.PASSING)
            part = into[start : start + PART_BYTES]
            try:
                modified = self._explained(partial(self._get, key, start, part, len(into)))
            except Trouble as trouble:
                if self._absent(trouble):
                    raise Trouble(str(trouble), Kind.ABSENT) from None
                raise
        return modified

    def _get(self, key: str, start: int, part: memoryview, nbytes: int) -> float:
        bounds = {"range": (start, start + len(part))} if len(part) < nbytes else None
        found = obstore.get(self._reader, key, options=bounds)
        if found.meta["size"] != nbytes:
            raise Trouble(f"{found.meta['size']} bytes in an object that should have {nbytes}", Kind.ABSENT)
        data = found.bytes()
        if len(data) != len(part):
            raise Trouble(f"an object ended after {start + len(data)} of {nbytes} bytes", Kind.ABSENT)
        part[:] = memoryview(data)
        return float(found.meta["last_modified"].timestamp())

    def put(self, key: str, data: memoryview, create: bool = False) -> bool:
        """Write the object, which appears whole or not at all. ``create``: unless it is there, if the store can tell
        at once; False: it was, or another one writes it (the same content; should that fail, a read tells)."""
        mode = "create" if create and self._creates and len(data) <= PART_BYTES else "overwrite"
        parts = self.location.scheme != "file" and len(data) > PART_BYTES

        def put() -> bool:
            try:
                obstore.put(self._writer, key, data, mode=mode, use_multipart=parts, chunk_size=PART_BYTES)
            except AlreadyExistsError:
                if mode != "create":  # a conflict with another write
                    raise
                return False
            return True

        try:
            return self._explained(put)
        except Trouble as trouble:
            if trouble.kind is Kind.ABSENT:  # not the object, which is just being written
                missing = "there is no such bucket, container or directory"
                raise Trouble(f"the object store of {self.location}: {missing}") from None
            if mode != "create" or "HTTP 501" not in str(trouble):
                raise
        self._creates = False  # a store without conditional writes
        return self.put(key, data)

    def delete(self, key: str) -> None:
        """Delete the object, if it exists."""
        try:
            self._explained(lambda: obstore.delete(self._writer, key))
        except Trouble as trouble:
            if trouble.kind is not Kind.ABSENT:
                raise

    def read(self, key: str, max_bytes: int) -> bytes:
        """The object's bytes; b"" if it has more than ``max_bytes``."""

        def read() -> bytes:
            found = obstore.get(self._reader, key)
            return bytes(found.bytes()) if found.meta["size"] <= max_bytes else b""

        return self._explained(read)

    def _absent(self, trouble: Trouble) -> bool:
        return trouble.kind is Kind.ABSENT or (trouble.kind is Kind.FORBIDDEN and self.denied_is_absent)

    def _explained(self, call: Callable[[], T]) -> T:
        """Return ``call()``; its exceptions become Trouble."""
        try:
            return call()
        except Trouble:
            raise
        except Exception as error:
            trouble = explain(error, self.location, self._endpoint)
        raise trouble  # outside of ``except``, so that no traceback contains the original's text


def _endpoint_of(location: ObjectLocation) -> str:
    """As the environment has it; "": the service's own."""
    _, *variables = _ENDPOINTS.get(location.scheme, ("",))
    return next(filter(None, map(os.environ.get, variables)), "")


def _open(location: ObjectLocation, endpoint: str, region: str, limits: dict[str, float], timeout: float) -> Any:
    """An obstore store. ``limits``: seconds by the names of its client options."""
    if location.scheme == "file":
        if not os.path.isdir(location.bucket):
            raise Trouble(f"there is no directory {location.bucket}; create it, below the file system's mount point")
        return stores.LocalStore(location.bucket)
    name, *_ = _ENDPOINTS[location.scheme]
    plain = endpoint.startswith("http:")
    config: dict[str, Any] = {name: endpoint} if endpoint else {}
    provider = None
    if location.scheme == "s3":
        provider = _aws_credentials()
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")
        config |= {"region": region} if region else {}
        config["virtual_hosted_style_request"] = not endpoint and "." not in location.bucket
        config["disable_bulk_delete"] = True  # one object at a time is deleted, and not every service has it
        config["unsigned_payload"] = not plain  # TLS protects it; without TLS the signature covers it
    options: dict[str, Any] = {each: timedelta(seconds=seconds) for each, seconds in limits.items()}
    options["allow_http"] = plain
    if location.scheme == "s3" and (certificates := os.environ.get("AWS_CA_BUNDLE")):
        if not os.access(certificates, os.R_OK):
            raise Trouble(f"AWS_CA_BUNDLE, {certificates}, cannot be read", Kind.DENIED)
        options["root_certificate"] = Path(certificates).read_bytes()
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=0.5), "base": 2}
    retries = {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=timeout), "backoff": backoff}
    return _CLASSES[location.scheme](
        location.bucket, client_options=options, retry_config=retries, credential_provider=provider, **config
    )


def _aws_credentials() -> Any:
    """boto3's, for a profile or ~/.aws; None: obstore finds them."""
    files = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")
    profile = os.environ.get("AWS_PROFILE")
    has_files = any(os.path.exists(os.path.expanduser(os.environ.get(name, default))) for name, default in files)
    if os.environ.keys() & _AWS_VARIABLES or not (profile or has_files):
        return None
    try:
        from botocore.exceptions import ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if not profile:
            return None
        wrong = "AWS_PROFILE is set, and profiles need boto3; `pip install boto3`"
    else:
        try:
            return Boto3CredentialProvider()
        except ProfileNotFound:
            wrong = "the profile in AWS_PROFILE does not exist"
        except ValueError:  # no credentials in the files: perhaps a region only
            return None
    raise Trouble(wrong, Kind.DENIED)
