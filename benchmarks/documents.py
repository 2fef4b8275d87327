"""Time to first token of long documents that exceed memory and are kept on disk, by connector.

    python benchmarks/documents.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpu 0 --dir /data/bench \\
        --connectors none kvtier kvtier:always offloading lmcache lmcache:direct --out documents.json
    python benchmarks/documents.py --model models/recall-6m --host-gib 0.06 --tokens 2048 --documents 12 \\
        --connectors none kvtier kvtier:directory kvtier:bucket offloading offloading:obj lmcache:server \\
        lmcache:bucket --environments '{"obj": {"PYTHONPATH": FOLDER, "NIXL_TELEMETRY_ENABLE": "1"}}'  # without GPU

The engines of all connectors (see tiers.py) run at once and alternate document by document. Each document is sent three
times, in different orders; the GPU's prefix cache is reset before each. The documents need several times the host
memory of each connector. After each computed document the benchmark waits until the connector has written it (or writes
nothing for a while), which favours slow writers. Connectors:

  none             vLLM alone
  kvtier           this project's; its store has a disk, admission "all" and a write queue as large as its memory; it
                   loads if that is expected to be faster
  kvtier:always    the same, and it loads all hits; kvtier:WORD: options of WORD in --variants
  kvtier:directory the same with a shared directory (file://) instead of the disk
  kvtier:bucket    the same with a bucket; its server is moto, on this machine
  offloading       OffloadingConnector with TieringOffloadingSpec and its "fs" tier; a file for each GPU block.
                   Without a GPU vLLM refuses it: with plain copies (connectors/cpu_offloading.py)
  offloading256    the same, its chunks 256 tokens long
  offloading:obj   the same with the "obj" tier. NIXL 1.5's plugin for it needs a library of CUDA, that of NIXL 1.0
                   does not: FOLDER has it
  lmcache          LMCacheConnectorV1 with local_disk, as it comes: through the page cache
  lmcache:direct   the same with its use_odirect
  lmcache:server   LMCacheMPConnector with a server of its own and its "fs" adapter
  lmcache:bucket   the same with its "s3" adapter. Only these two of LMCache's run without a GPU

All directories are under --dir, on one file system. kvtier and the fs tier use O_DIRECT if the file system supports it;
LMCache does not by default. Written files are synced and dropped from the page cache before each pass (posix_fadvise),
so that each pass reads each file from disk once. The rates of the disk are measured at the start, with O_DIRECT, eight
threads, 4 MiB at a time.

Columns: ttft in ms, median, best and worst over the documents; share of prompt tokens by source: computed, gpu (prefix
cache), memory, disk (or directory, or bucket). The connector counts bytes from disk; for LMCache the kernel's count of
its process is used. same: share of answers that begin as the document's first answer (from the GPU's cache); a
connector that answers before its KV has arrived differs. None: the answers cannot tell. kept: bytes that lie on disk or
in the bucket at the end.
"""

import argparse
import functools
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from disk_files import allocated, bytes_read, disk_rate, drop_cached
from s3_server import REGION, S3Server
from support import eventually
from tiers import (
    GIB,
    Peer,
    add_arguments,
    bytes_per_token,
    facts,
    guarded,
    median,
    sees,
    start,
    stop,
    table,
    tailed_prompt,
    vocabulary,
)

from vllm_kvtier.devtools.clients import PromptTokens, prompt_tokens
from vllm_kvtier.devtools.engines import kvtier
from vllm_kvtier.devtools.processes import free_port, group_members
from vllm_kvtier.devtools.stores import counts_when_idle, end_store, store_counts, tier_of
from vllm_kvtier.store.launcher import start_store, store_path
from vllm_kvtier.store.options import StoreOptions

PASSES = "computed", "again", "once more"
WORDS = {"always": {"load_policy": "always"}, "directory": {}, "bucket": {}}
# LMCache's s3 adapter takes the bucket as the first label of the host name, and no path. 127.1 is 127.0.0.1 to the
# resolver, and moto sees the bucket 127: so it needs neither a name server nor a line in /etc/hosts.
BUCKETS = {"kvtier:bucket": "kvtier", "offloading:obj": "offloading", "lmcache:bucket": "127"}
LMCACHE_SERVERS = ("lmcache:server", "lmcache:bucket")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "root", "AWS_SECRET_ACCESS_KEY": "root", "AWS_EC2_METADATA_DISABLED": "true"}
STILL_SECONDS = 1.5  # without a byte more on disk: nothing more comes
WRITE_SECONDS = 25.0  # that a connector may take to write a document
FS_READ = r"vllm:kv_offload_tiering_read_bytes_total"


class DiskPeer(Peer):
    """A Peer with a directory of its own on the disk."""

    def __init__(self, connector: str, args: argparse.Namespace, model: Path, gpu_tokens: int, host_tokens: int):
        self.folder, self._store = folder_of(connector, args), ""
        self._server: subprocess.Popen | None = None
        self._bucket = args.bucket_server if connector in BUCKETS else None
        self.kind, _, word = connector.partition(":")
        self._tier = "object" if word in ("directory", "bucket") else "disk"
        if self.kind == "kvtier":
            self._store = socket_in(run_of(connector, args))
            self.folder.mkdir(parents=True, exist_ok=True)
            start_store(self._store, store_options(self.folder, word, args))
        if connector in LMCACHE_SERVERS:
            self._server = lmcache_server(connector, args)
        super().__init__(connector, args, model, gpu_tokens, host_tokens)
        self.host_bytes = host_of(args)
        self.sees = True  # whether its answers tell other KV

    @staticmethod
    def _transfer(connector: str, host: int, args: argparse.Namespace) -> tuple[dict | None, dict]:
        host, (kind, _, word) = host_of(args), connector.partition(":")
        folder = folder_of(connector, args)
        folder.mkdir(parents=True, exist_ok=True)
        if connector == "none":
            return None, {}
        if kind == "kvtier":
            run = run_of(connector, args)
            options = {**WORDS, **args.variants}[word] if word else {}
            return kvtier({**args.kvtier_options, **options}), {"XDG_RUNTIME_DIR": str(run)}
        if connector in ("offloading", "offloading256", "offloading:obj"):
            plain = {"spec_name": "PlainTieringSpec", "spec_module_path": "cpu_offloading"}
            tier = obj_tier(args) if word == "obj" else {"type": "fs", "root_dir": str(folder)}
            extra = {
                **({"spec_name": "TieringOffloadingSpec"} if args.gpu is not None else plain),
                "cpu_bytes_to_use": host,
                "secondary_tiers": [tier],
                **({"block_size": 256} if connector == "offloading256" else {}),
            }
            return {
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra
            }, args.environments.get(word, {})  # fmt: skip
        if connector in LMCACHE_SERVERS:
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": args.lmcache_ports[connector]}
            return {
                "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra
            }, {"LMCACHE_TRACK_USAGE": "false"}  # fmt: skip
        if connector in ("lmcache", "lmcache:direct"):
            return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, {
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(host / GIB),
                "LMCACHE_LOCAL_DISK": f"{folder}/",
                "LMCACHE_MAX_LOCAL_DISK_SIZE": str(disk_of(args) / GIB),
                "LMCACHE_EXTRA_CONFIG": json.dumps({"use_odirect": word == "direct"}),
                "LMCACHE_TRACK_USAGE": "false",
            }
        raise SystemExit(f"unknown connector {connector!r}; see --help")

    @property
    def writes(self) -> bool:
        return self.connector != "none"

    def read_bytes(self) -> float:
        """From disk, since the start."""
        if self.kind == "kvtier":
            return tier_of(store_counts(self._store), self._tier).read_bytes
        if self.kind.startswith("offloading"):
            return self.total(FS_READ)
        pid = self._server.pid if self._server else self.engine.pid
        count = "rchar" if self._bucket else "read_bytes"  # LMCache's S3 client calls read() for its sockets
        return sum(bytes_read(member, count) for member in group_members(pid)) if self.writes else 0.0

    def kept(self) -> int:
        """Bytes on the disk or in the bucket."""
        return bucket_bytes(self._bucket, BUCKETS[self.connector]) if self._bucket else allocated(self.folder)

    def written(self, wanted: float) -> None:
        """Until so many bytes lie in its directory, or nothing more comes."""
        deadline = time.monotonic() + WRITE_SECONDS
        last, since = -1, 0.0
        while self.writes and (now := time.monotonic()) < deadline:
            there = self.kept()
            if there != last:
                last, since = there, now
            if there >= wanted or now - since > STILL_SECONDS:
                break
            self.nudge()  # some only work in an engine's steps
            time.sleep(0.02)
        if self.kind == "kvtier":
            counts_when_idle(self._store)

    def tiers(self) -> list[dict]:
        """What a store of ours counts of its disk."""
        return [vars(tier) for tier in store_counts(self._store).tiers] if self.kind == "kvtier" else []

    def end_server(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


class Asked(NamedTuple):
    """Of one document, in one pass."""

    seconds: float
    tokens: PromptTokens
    read: float  # bytes from disk meanwhile
    opening: list[int] | None  # the answer's first tokens


def store_options(folder: Path, word: str, args: argparse.Namespace) -> StoreOptions:
    """Of the store that an engine of ours finds: as its own would be, but that nothing is too much to be written."""
    tiers = {
        "directory": {"object_url": f"file://{folder}", "object_size": str(disk_of(args))},
        "bucket": {"object_url": "s3://kvtier", "object_region": REGION},
    }
    if word == "bucket":
        tiers[word]["object_endpoint"] = args.bucket_server.endpoint
    return StoreOptions(
        size=str(host_of(args)),
        idle_seconds=600,
        disk_admission="all",
        object_admission="all",
        disk_queue_mib=max(1, host_of(args) >> 20),
        **tiers.get(word, {"disk_path": str(folder), "disk_size": str(disk_of(args))}),
    )


def obj_tier(args: argparse.Namespace) -> dict:
    server = {"bucket": "offloading", "endpoint_override": args.bucket_server.endpoint, "region": REGION}
    key = {"access_key": CREDENTIALS["AWS_ACCESS_KEY_ID"], "secret_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
    return {"type": "obj", "store_config": server | key}


def lmcache_server(connector: str, args: argparse.Namespace) -> subprocess.Popen:
    port = args.lmcache_ports[connector] = free_port()
    command = [str(Path(args.python).parent / "lmcache"), "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-port", str(free_port()), "--disable-observability"]
    command += ["--l1-size-gb", str(host_of(args) / GIB), "--eviction-policy", "LRU"]
    command += ["--l2-adapter", json.dumps(lmcache_adapter(connector, args))]
    if args.gpu is None:  # its defaults are for GPUs, and pickle the KV of others
        command += ["--supported-transfer-mode", "auto", "--shm-name", f"documents-{port}"]
    with Path(args.logs, f"server-of-{connector.replace(':', '-')}.log").open("wb") as log:
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(listens, 60, "LMCache's server")
    return server


def lmcache_adapter(connector: str, args: argparse.Namespace) -> dict:
    if connector in BUCKETS:
        server = {"s3_endpoint": f"127.1:{args.bucket_server.port}", "s3_region": REGION, "disable_tls": True}
        return {"type": "s3", **server}  # it has the credentials from its environment
    folder = folder_of(connector, args)
    folder.mkdir(parents=True, exist_ok=True)
    return {"type": "fs", "base_path": str(folder)}


def bucket_bytes(server: S3Server, bucket: str) -> int:
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return sum(each["Size"] for page in pages for each in page.get("Contents", ()))


def host_of(args: argparse.Namespace) -> int:
    return int(args.host_gib * GIB)


def disk_of(args: argparse.Namespace) -> int:
    """Bytes that each may write: all documents, and what is asked besides."""
    return math.ceil(1.3 * args.documents * args.tokens * bytes_per_token(args.model)) + (256 << 20)


def folder_of(connector: str, args: argparse.Namespace) -> Path:
    return args.dir / connector.replace(":", "-")


def run_of(connector: str, args: argparse.Namespace) -> Path:
    """Where a store of ours has its socket; short, as its path must be."""
    return Path(args.logs) / f"run-{connector.partition(':')[2]}"


def socket_in(run: Path) -> str:
    before = os.environ.get("XDG_RUNTIME_DIR")
    run.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(run)
    try:
        return store_path()
    finally:
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


# -- measuring -----------------------------------------------------------------------------------------------------


def ask(peer: DiskPeer, prompt: list[int], name: str, number: int) -> Asked:
    """``number``: of the document, from 1 on; how much must have been written after it was computed."""
    peer.forget()
    tokens, read, stored = prompt_tokens(peer.engine.base_url), peer.read_bytes(), peer.stored()
    seconds = peer.first_token(prompt)
    tokens, opening = prompt_tokens(peer.engine.base_url) - tokens, peer.opening
    if name == PASSES[0]:
        peer.first_token(prompt)  # from the GPU's prefix cache: what the later passes should say, to the bit
        opening = peer.opening
    if name == PASSES[0] and peer.writes:
        peer.settle(stored, len(prompt))
        peer.written(0.97 * number * len(prompt) * peer.per_token)
    elif peer.kind == "kvtier":
        counts_when_idle(peer._store)  # what was begun for a prompt that was then computed must not slow the next one
    return Asked(seconds, tokens, peer.read_bytes() - read, opening)


def one_pass(
    peers: list[DiskPeer], documents: list[list[int]], name: str, order: list[int], deadline: float
) -> dict[DiskPeer, dict[int, Asked]]:
    """By peer and document. All of a pass have the same documents, but for those that failed."""
    taken: dict[DiskPeer, dict[int, Asked]] = {peer: {} for peer in peers}
    for turn, number in enumerate(order, 1):
        if time.monotonic() > deadline and turn > 2:
            print(f"out of time: {name} ends after {turn - 1} documents", flush=True)
            break
        for peer in list(peers):
            asked = guarded(peers, peer, functools.partial(ask, peer, documents[number], name, turn))
            if asked is not None:
                taken[peer][number] = asked
    return taken


def row(peer: DiskPeer, name: str, taken: dict[int, Asked], first: dict[int, Asked]) -> dict:
    """``first``: of the first pass."""
    same = [first[number].opening == a.opening for number, a in taken.items() if number in first and peer.sees]
    asked = list(taken.values())
    times = [a.seconds * 1000 for a in asked]
    # What was read for a prompt that was computed after all is not where its tokens came from.
    total = sum(a.tokens.total for a in asked)
    pulled = sum(a.tokens.pulled for a in asked)
    disk = min(sum(a.read for a in asked) / peer.per_token, pulled)
    shares = {
        "computed": sum(a.tokens.computed for a in asked), "gpu": sum(a.tokens.cached for a in asked),
        "memory": pulled - disk, "disk": disk,
    }  # fmt: skip
    return {
        "connector": peer.connector, "pass": name, "n": len(asked), "ttft": round(median(times), 1),
        "best": round(min(times), 1), "worst": round(max(times), 1),
        **{source: round(n / total, 3) for source, n in shares.items()},
        "read_gb": round(sum(a.read for a in asked) / 1e9, 2), "seconds": round(sum(times) / 1000, 2),
        "same": round(sum(same) / len(same), 3) if same else None,
    }  # fmt: skip


class Results:
    """On disk after each row."""

    def __init__(self, path: Path | None, meta: dict):
        self._path, self.data = path, {"meta": meta, "documents": []}

    def add(self, row: dict) -> None:
        self.data["documents"].append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.data, indent=1))


def fitting(args: argparse.Namespace) -> int:
    """As many of the documents as there is room for on the disk, with a tenth to spare."""
    each = args.tokens * bytes_per_token(args.model) * sum(connector != "none" for connector in args.connectors)
    room = int(0.9 * shutil.disk_usage(args.dir).free // max(1, each))
    if room < args.documents:
        print(f"room for {room} of {args.documents} documents in {args.dir}", flush=True)
    return min(room, args.documents)


def run(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    args.dir = Path(tempfile.mkdtemp(prefix="documents-", dir=args.dir))
    peers: list[DiskPeer] = []
    args.lmcache_ports = {}
    args.bucket_server = S3Server() if BUCKETS.keys() & set(args.connectors) else None
    try:
        if args.bucket_server is not None:
            os.environ.update(CREDENTIALS)  # of our stores' processes
            args.bucket_server.start()
            for connector in BUCKETS.keys() & set(args.connectors):
                args.bucket_server.create(BUCKETS[connector])
        args.documents = fitting(args)
        rate = disk_rate(args.dir, args.rate_mib << 20)
        print(f"disk: {rate}", flush=True)
        peers = start(args, args.tokens + 64, args.tokens, DiskPeer)
        of_memory = args.documents * args.tokens * bytes_per_token(args.model) / host_of(args)
        meta = {
            **facts(args, peers), "tokens": args.tokens, "documents": args.documents, "disk": rate,
            "times_memory": round(of_memory, 1),
        }  # fmt: skip
        results = Results(args.out, meta)
        print(json.dumps(meta), flush=True)
        measure(args, peers, results, begin + args.seconds)
        results.data["counters"] = {peer.connector: peer.counters() for peer in peers}
        results.data["kept"] = {peer.connector: peer.kept() for peer in peers}
        results.data["tiers"] = {peer.connector: peer.tiers() for peer in peers if peer.tiers()}
        results.write()
    finally:
        stop(peers)
        for peer in peers:
            peer.end_server()
        if args.bucket_server is not None:
            args.bucket_server.kill()
        for connector in args.connectors:  # also of those that were left out
            if connector.startswith("kvtier"):
                end_store(socket_in(run_of(connector, args)))
        shutil.rmtree(args.dir, ignore_errors=True)
    print(table(results.data["documents"]))
    print(f"{time.monotonic() - begin:.0f} s in all")


def measure(args: argparse.Namespace, peers: list[DiskPeer], results: Results, deadline: float) -> None:
    rng, vocab = random.Random(5), vocabulary(args.model)
    warm = tailed_prompt(rng, vocab, args.tokens // 4)
    for peer in list(peers):  # the first long prompt's extra costs are not counted
        guarded(peers, peer, functools.partial(peer.first_token, warm))
        peer.sees = bool(guarded(peers, peer, functools.partial(sees, peer, warm, rng, vocab)))
    documents = [tailed_prompt(rng, vocab, args.tokens) for _ in range(args.documents)]
    order = list(range(args.documents))
    left, first = deadline - time.monotonic(), {}
    for number, name in enumerate(PASSES):
        if number:
            rng.shuffle(order)
            for peer in peers:
                drop_cached(peer.folder)
        # The later passes have the documents of the first, and half of the time.
        taken = one_pass(peers, documents, name, order, deadline - left * (0.5, 0.25, 0.0)[number])
        first = first or taken
        for peer, asked in taken.items():
            if asked:
                results.add(row(peer, name, asked, first[peer]))
        order = sorted({document for asked in taken.values() for document in asked}) if not number else order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--dir", type=Path, default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a document")
    parser.add_argument("--rate-mib", type=int, default=2048, help="of the measurement of the disk itself")
    parser.set_defaults(host_gib=2.0)
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
