"""An Azure Blob server (Microsoft's Azurite, of npm) in a separate process, for tests, which can pause and kill it."""

import base64
import email.utils
import hashlib
import hmac
import shutil
import subprocess
import urllib.request

from s3_server import S3Server
from support import eventually

COMMAND = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
VARIABLES = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
VERSION = "2021-08-06"


class AzureServer(S3Server):
    def __init__(self):
        super().__init__()
        self.endpoint += f"/{ACCOUNT}"

    def start(self) -> "AzureServer":
        command = [
            COMMAND,
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(self.port),
            "--inMemoryPersistence",
            "--silent",
        ]
        command += ["--skipApiVersionCheck", "--disableTelemetry"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._listens, 30)
        return self

    def create(self, container: str) -> None:
        date = email.utils.formatdate(usegmt=True)
        signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{VERSION}\n/{ACCOUNT}/{ACCOUNT}/{container}\n"
        digest = hmac.new(base64.b64decode(KEY), f"{signed}restype:container".encode(), hashlib.sha256).digest()
        headers = {"x-ms-date": date, "x-ms-version": VERSION}
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{container}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10).close()
