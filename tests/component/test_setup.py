"""scripts/setup where the index's certificate is of a company's own CA, as behind a TLS proxy."""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.missing import missing
from tests.servers.index import Index

pytestmark = pytest.mark.slow
SETUP = Path(__file__).parents[2] / "scripts" / "setup"
SYSTEM_STORES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")

UV = f"""
import os, sys
def main():
    os.execv({(shutil.which("uv", path=os.path.dirname(sys.executable)) or "")!r}, sys.argv)
"""
"""A package of this name that starts the real one."""

PYPROJECT = """
[build-system]
requires = ["builder"]
build-backend = "builder"

[project]
name = "project"
version = "1.0"
"""

BUILDER = """
import os, zipfile
def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "project-1.0-py3-none-any.whl"
    info = "project-1.0.dist-info/"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n")
        wheel.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        )
        wheel.writestr(info + "RECORD", "")
    return name
"""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "company.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture
def index(authority: trustme.CA) -> Iterator[Index]:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with Index(tls=tls) as index:
        index.add("uv", files={"uv.py": UV}, scripts={"uv": "uv:main"})
        index.add("locked")
        index.add("builder", files={"builder.py": BUILDER})
        yield index


@pytest.fixture(scope="module")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where one is expected, and a copy of it as it was made, which takes seconds."""
    directory = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    (directory / "venv").rename(directory / "new")
    return directory / "venv", directory / "new"


@pytest.fixture
def venv(new_environment: tuple[Path, Path]) -> Iterator[Path]:
    path, new = new_environment
    shutil.copytree(new, path, symlinks=True)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def clone(tmp_path: Path, index: Index) -> Path:
    """A clone of a project with one locked package, whose build downloads another."""
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(SETUP, clone / "scripts")
    [wheel] = index.packages["locked"].values()
    digest = hashlib.sha256(wheel).hexdigest()
    (clone / "requirements.lock").write_text(f"locked==1.0 --hash=sha256:{digest}\n")
    (clone / "pyproject.toml").write_text(PYPROJECT)
    return clone


def set_up(
    clone: Path, venv: Path, *before: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As on a machine with no settings of pip and uv but these."""
    return subprocess.run(
        [*before, "scripts/setup", str(venv)],
        cwd=clone,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(clone.parent),
            "PYTHON": sys.executable,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
            "UV_HTTP_RETRIES": "0",
            "UV_NO_CONFIG": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def is_set_up(venv: Path) -> bool:
    code = "import importlib.metadata, locked; importlib.metadata.version('project')"
    return subprocess.run([venv / "bin/python", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"])
def test_a_certificate_configured_for_one_tool_is_used_by_all(
    clone: Path, venv: Path, index: Index, ca_file: Path, variable: str
) -> None:
    done = set_up(clone, venv, PIP_INDEX_URL=index.url, **{variable: str(ca_file)})

    assert done.returncode == 0, done.stderr
    assert is_set_up(venv)


def test_a_certificate_in_the_settings_of_pip_is_used_by_all(
    clone: Path, venv: Path, index: Index, ca_file: Path
) -> None:
    # The environment's own file wins over those of the machine.
    settings = venv / "pip.conf"
    settings.write_text(f"[global]\nindex-url = {index.url}\ncert = {ca_file}\n")

    done = set_up(clone, venv, PIP_CONFIG_FILE=str(settings))

    assert done.returncode == 0, done.stderr
    assert is_set_up(venv)


def test_the_certificates_of_the_system_are_used_by_default(
    clone: Path, venv: Path, index: Index, ca_file: Path
) -> None:
    if shutil.which("bwrap") is None:
        missing("bwrap is not installed")
    store = next((path for path in SYSTEM_STORES if os.path.exists(path)), None)
    if store is None:
        missing("this system has no certificates")
    # A system whose administrator has added the company's CA.
    system = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(ca_file), store]

    done = set_up(clone, venv, *system, PIP_INDEX_URL=index.url)

    assert done.returncode == 0, done.stderr
    assert is_set_up(venv)


def test_an_unknown_certificate_is_refused_with_advice(
    clone: Path, venv: Path, index: Index
) -> None:
    done = set_up(clone, venv, PIP_INDEX_URL=index.url)

    assert done.returncode != 0
    for word in ("PIP_INDEX_URL", "HTTPS_PROXY", "SSL_CERT_FILE"):
        assert word in done.stderr
    assert not any(path.startswith("/files") for path in index.asked)
