"""
What a start imports. Every module costs every start, so the numbers here may grow only for a
reason; the packages are those that take long and are for other uses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

OF_OTHER_USES = {
    "aiodocker",
    "aiohttp",
    "aiomysql",
    "alembic",
    "asyncpg",
    "cryptography",
    "fastapi",
    "h11",
    "httpx",
    "obstore",
    "prometheus_client",
    "redis",
    "sqlalchemy",
}
OF_SERVERS = {"uvicorn", "uvloop", "websockets"}
OF_COMMANDS = {"typer"}

REPORT = """
import json, sys
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
IMPORT = f"import atoll{REPORT}"
EMBEDDED = f"""
from atoll import Atoll
with Atoll(pool={{"size": 0}}) as atoll, atoll.session() as session:
    assert session.run("print(1)").stdout == "1\\n"
{REPORT}
"""
RUN = f"""
import atexit, sys
from atoll.cli import main
@atexit.register
def report():
    {REPORT.strip().replace(chr(10), chr(10) + "    ")}
sys.argv[1:] = ["run", "-c", "print(1)"]
main()
"""
SERVER = f"""
import asyncio
from atoll.app import server
from atoll.app.application import application
from atoll.settings import Settings
async def main():
    async with application(Settings.read()):
        {REPORT.strip().replace(chr(10), chr(10) + "        ")}
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("code", "most", "absent"),
    [
        pytest.param(IMPORT, 80, {"asyncio", "pydantic", *OF_OTHER_USES}, id="import atoll"),
        pytest.param(EMBEDDED, 940, OF_OTHER_USES | OF_SERVERS | OF_COMMANDS, id="embedded"),
        pytest.param(RUN, 1000, OF_OTHER_USES | OF_SERVERS, id="atoll run"),
        pytest.param(SERVER, 1000, OF_OTHER_USES | OF_COMMANDS, id="server"),
    ],
)
def test_a_start_imports_little(code: str, most: int, absent: set[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ATOLL_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stderr.splitlines()[-1])
    assert not absent & set(modules)
    assert len(modules) <= most
