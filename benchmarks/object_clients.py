#!/usr/bin/env python3
"""Objects written and read by the object tier's client, beside boto3 as its predecessor used it, and plain files.

usage: benchmarks/object_clients.py [--url file:///mnt/shared] [--json results.json]

The server is moto's, on this machine: it needs more processor time than either client, so compare the clients'. With
--url the second table is of that directory instead of a temporary one.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from botocore.config import Config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from s3_server import REGION, S3Server

from vllm_kvtier.store.tiers.objects.object_client import ObjectClient
from vllm_kvtier.store.tiers.objects.object_names import parse_url

NBYTES = 9 << 18  # 16 tokens of an 8B model
BUCKET, CHUNK = "blocks", 256 << 10


class Boto3:
    """As vllm-kvtier had it before obstore: no checksums of the SDK, reads into memory in chunks, 1 MiB a write."""

    def __init__(self, endpoint: str, threads: int):
        config = Config(
            max_pool_connections=threads,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client = boto3.session.Session().client("s3", endpoint_url=endpoint, region_name=REGION, config=config)
        self._client.meta.events.register_last("before-call.s3", expect_nothing)

    def put(self, key: str, data: memoryview) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=Body(data))

    def get(self, key: str, into: memoryview, deadline: float) -> None:
        body = self._client.get_object(Bucket=BUCKET, Key=key)["Body"]
        at = 0
        while at < len(into):
            at += body.readinto(into[at : at + CHUNK])
        body.close()

    def size(self, key: str) -> int:
        return self._client.head_object(Bucket=BUCKET, Key=key)["ContentLength"]


def expect_nothing(params: dict, **_) -> None:
    params["headers"].pop("Expect", None)


class Body:
    def __init__(self, data: memoryview):
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        part = self._data[self._at : len(self._data) if size < 0 else self._at + max(size, 1 << 20)]
        self._at += len(part)
        return part

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at


class Files:
    """What the directory's file system allows: write beside, rename; read into memory."""

    def __init__(self, root: Path):
        self._root = root

    def put(self, key: str, data: memoryview) -> None:
        path = self._root / key
        with open(f"{path}.new", "wb", buffering=0) as file:
            file.write(data)
        os.rename(f"{path}.new", path)

    def get(self, key: str, into: memoryview, deadline: float) -> None:
        with open(self._root / key, "rb", buffering=0) as file:
            assert file.readinto(into) == len(into)

    def size(self, key: str) -> int:
        return os.stat(self._root / key).st_size


def measure(clients: dict, count: int, threads: int, rounds: int) -> list[dict]:
    """Medians of ``rounds``, in which the clients take turns."""
    memory = memoryview(bytearray(os.urandom(NBYTES)) * threads)
    seen: dict = {(name, what): [] for name in clients for what in ("put", "get", "size")}
    with ThreadPoolExecutor(threads) as pool:
        for turn in range(rounds + 1):
            for name, client in clients.items():
                keys = [f"{name}-{turn}-{i}" for i in range(count)]
                places = [memory[i % threads * NBYTES : (i % threads + 1) * NBYTES] for i in range(count)]
                late = [time.monotonic() + 600] * count
                for what, arguments in (("put", (keys, places)), ("get", (keys, places, late)), ("size", (keys,))):
                    began, cpu = time.monotonic(), processor()
                    list(pool.map(getattr(client, what), *arguments))
                    if turn:  # the first one makes connections
                        seen[name, what].append((time.monotonic() - began, processor() - cpu))
    rows = []
    for (name, what), times in seen.items():
        seconds, cpu = (statistics.median(each) / count for each in zip(*times, strict=True))
        rate = 0.0 if what == "size" else NBYTES / seconds / 1e6
        rows.append({"client": name, "call": what, "ms": seconds * 1e3, "cpu_ms": cpu * 1e3, "mb_per_s": rate})
    return rows


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--objects", type=int, default=48)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    sizes = asked.objects, asked.threads, asked.rounds
    server = S3Server().start()
    try:
        server.create(BUCKET)
        ours = ObjectClient(parse_url(f"s3://{BUCKET}/x"), server.endpoint, REGION, 30.0, 60.0)
        rows = {"S3 (moto)": measure({"boto3": Boto3(server.endpoint, asked.threads), "obstore": ours}, *sizes)}
    finally:
        server.kill()
    with tempfile.TemporaryDirectory(dir=parse_url(asked.url).bucket if asked.url else None) as root:
        shared = ObjectClient(parse_url(f"file://{root}"), "", "", 30.0, 60.0)
        rows["directory"] = measure({"plain files": Files(Path(root)), "obstore": shared}, *sizes)
    for title, table in rows.items():
        print(f"{title}: {asked.objects} objects of {NBYTES / 2**20:g} MiB, {asked.threads} threads")
        for row in table:
            print("  {client:9} {call:5} {ms:8.2f} ms an object, the client's processor {cpu_ms:6.2f} ms".format(**row))
    if asked.json:
        about = {"processors": os.cpu_count(), "machine": platform.machine(), "objects": asked.objects}
        asked.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
