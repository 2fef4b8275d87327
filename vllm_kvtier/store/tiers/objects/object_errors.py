"""Failed requests to an object store, as messages that may be logged.

obstore's exceptions have URLs and whole answers of servers, over many lines. Their text never leaves this module: a
message is made from the server's error code, the HTTP status or the errno in it.
"""

import errno
import os
import re

from vllm_kvtier.store.tiers.objects.object_names import CREDENTIALS, ObjectLocation
from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

_CODES = {  # of S3, Google and Azure
    "AccessDenied": (Kind.FORBIDDEN, "access denied: the credentials lack the right to do this"),
    "AuthorizationPermissionMismatch": (Kind.FORBIDDEN, "access denied: the credentials lack the right to do this"),
    "InvalidAccessKeyId": (Kind.DENIED, "it does not know the access key"),
    "SignatureDoesNotMatch": (Kind.DENIED, "the secret key is not the one that belongs to the access key"),
    "AuthenticationFailed": (Kind.DENIED, "the account's key is wrong"),
    "AuthorizationFailure": (Kind.DENIED, "the account's key is wrong, or this network may not use the account"),
    "ExpiredToken": (Kind.DENIED, "the credentials have expired"),
    "InvalidToken": (Kind.DENIED, "the session token is not valid"),
    "RequestTimeout": (Kind.PASSING, "no data in time"),
    "RequestTimeTooSkewed": (Kind.FAILED, "this machine's clock is wrong"),
    "QuotaExceeded": (Kind.FULL, "its quota is used up"),
    "XMinioStorageFull": (Kind.FULL, "it is full"),
    "SlowDown": (Kind.THROTTLED, "it asks for fewer requests"),
    "ServerBusy": (Kind.THROTTLED, "it asks for fewer requests"),
}
_OTHER_REGION = "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"
_NO_BUCKET = {"NoSuchBucket": "there is no such bucket", "ContainerNotFound": "there is no such container"}
_ERRNOS = {
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), Kind.ABSENT),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Kind.FORBIDDEN),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Kind.FULL),
}
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})\b")
_ERRNO = re.compile(r"\(os error (\d+)\)")
_URL = re.compile(r"performing \w+ (\S+)")
# By host, or the beginning of the path: buckets and prefixes may have any of these words in their names.
_FOR_CREDENTIALS = re.compile(
    r"\w+://(?:169\.254\.|\[fd00:ec2|metadata\.google\.|sts\.(?:[\w-]+\.)?amazonaws\.|"
    r"(?:oauth2|sts|iamcredentials)\.googleapis\.|login\.microsoftonline\.|"
    r"(?![^/]*\.(?:amazonaws|googleapis|windows)\.)[^/]+/(?:latest/(?:api/token|meta-data)|"
    r"computeMetadata/|metadata/identity/|[^/]+/oauth2/v2\.0/token))"
)


def explain(error: Exception, location: ObjectLocation, endpoint: str = "") -> Trouble:
    """What an exception of obstore means. ``endpoint``: at which the objects are, if that is not the service's own."""
    text = str(error)
    if location.scheme == "file":
        return _of_file(error, text, location)
    code = match[1] if (match := _CODE.search(text)) else ""
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    name = type(error).__name__
    unidentified = name == "UnauthenticatedError" or "ccount must be specified" in text
    if _is_for_credentials(text, location, endpoint) or (unidentified and not status):
        missing = f"credentials for it were not found or cannot be used; {CREDENTIALS[location.scheme]}"
        return _trouble(location, missing, name, Kind.DENIED)
    if status:
        return _answered(location, code, status)
    if isinstance(error, FileNotFoundError):
        return Trouble("the object is not there", Kind.ABSENT)
    kind = Kind.PASSING
    if "ertificate" in text:
        kind = Kind.FAILED
        words = "its certificate is not trusted; set SSL_CERT_FILE to a file with its authority's certificate"
    elif "kind: Timeout" in text or "TimedOut" in text:
        words = "no answer in time"
    elif "kind: Connect" in text:
        words = "it cannot be reached"
    elif "HTTP error" in text or "kind: Request" in text or "kind: Body" in text or "kind: Decode" in text:
        words = "the connection broke"
    else:
        words = "the request failed"
    return _trouble(location, words, name, kind)


def _is_for_credentials(text: str, location: ObjectLocation, endpoint: str) -> bool:
    """Whether the request that failed was not for an object."""
    objects = f"{endpoint.rstrip('/')}/{location.bucket}/"
    urls = [url for url in _URL.findall(text) if not (endpoint and url.startswith(objects))]
    return "token request" in text or any(map(_FOR_CREDENTIALS.match, urls))


def _answered(location: ObjectLocation, code: str, status: int) -> Trouble:
    answer = f"{code or 'no code'}, HTTP {status}"
    if code in _NO_BUCKET:
        return _trouble(location, _NO_BUCKET[code], answer)
    if status == 404:
        return Trouble("the object is not there", Kind.ABSENT)
    if code in _OTHER_REGION:
        return _trouble(location, "the bucket is in another region; set object_region", answer)
    if code in _CODES:
        kind, words = _CODES[code]
    elif status in (401, 403):
        kind, words = Kind.DENIED if status == 401 else Kind.FORBIDDEN, "access denied"
    elif status == 507:
        kind, words = Kind.FULL, "it is full"
    elif status in (429, 503):  # also without a code: the answer to HEAD has no body
        kind, words = Kind.THROTTLED, "it asks for fewer requests"
    elif status in (408, 409) or status >= 500:  # 409: a conflict with another write
        kind, words = Kind.PASSING, "it fails"
    else:
        kind, words = Kind.FAILED, "it refuses a request"
    return _trouble(location, words, answer, kind)


def _of_file(error: Exception, text: str, location: ObjectLocation) -> Trouble:
    number = int(match[1]) if (match := _ERRNO.search(text)) else 0
    kind = Kind.ABSENT if isinstance(error, FileNotFoundError) else _ERRNOS.get(number, Kind.PASSING)
    if kind is Kind.ABSENT:
        return Trouble("the object is not there", kind)
    return _trouble(location, os.strerror(number) if number else "a file cannot be used", type(error).__name__, kind)


def _trouble(location: ObjectLocation, words: str, source: str, kind: Kind = Kind.FAILED) -> Trouble:
    return Trouble(f"the object store of {location}: {words} ({source})", kind)
