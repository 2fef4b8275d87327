"""An S3 server (moto's) in a separate process, for tests, which can pause, kill and restart it.

A kill loses its content. It accepts any credentials until ``check``; then only those of ``add_user``, for the user's
permissions, as S3 does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import boto3
from botocore.config import Config
from support import eventually, stop

from vllm_kvtier.devtools.processes import free_port

REGION = "us-east-1"


class S3Server:
    def __init__(self, log: Path | None = None):
        """``log``: a file for a line a request."""
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = log or Path(os.devnull)
        self._process: subprocess.Popen | None = None

    def start(self) -> "S3Server":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._listens, 30)
        return self

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """It answers no request until ``go_on``."""
        stop(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def create(self, bucket: str) -> None:
        self.client().create_bucket(Bucket=bucket)

    def check(self, credentials: bool = True) -> None:
        """Whether credentials matter from now on."""
        url, after = f"{self.endpoint}/moto-api/reset-auth", b"0" if credentials else b"inf"
        request = urllib.request.Request(url, after, {"Content-Type": "text/plain"}, method="POST")
        urllib.request.urlopen(request, timeout=10).close()

    def client(self, service: str = "s3", key: str = "root", secret: str = "root"):
        """boto3's, for the test itself."""
        config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        return boto3.session.Session().client(
            service, endpoint_url=self.endpoint, region_name=REGION, config=config,
            aws_access_key_id=key, aws_secret_access_key=secret,
        )  # fmt: skip

    def add_user(self, name: str, actions: list[str]) -> Mapping[str, str]:
        """A user with these permissions; returns the variables for its processes."""
        iam = self.client("iam")
        iam.create_user(UserName=name)
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
        iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
