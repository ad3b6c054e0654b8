"""An executor that starts with the journal of its predecessor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.link.errors import ExecutorError
from tests.executors import RunOutput, executor, job
from tests.runs import run_over

pytestmark = pytest.mark.anyio

CODE = """
import sys
print('out' * 50_000)
print('err', file=sys.stderr)
def handler(event):
    return {'seen': event, 'name': '\\udc80'}
"""


async def test_the_next_executor_restores_unacknowledged_results(
    bubblewrap: str, tmp_path: Path
) -> None:
    first, second = RunOutput(), RunOutput()
    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        result = await run_over(link, job("one", CODE, event=[1]), first)
        taken = await run_over(link, job("two", "print(2)"), RunOutput())
        assert taken["exit_code"] == 0
        link.acknowledge("two")
        link.close()

    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        # Acknowledgements are not stored: the control plane acknowledges the other result again.
        assert link.hello["runs"] == [{"id": "one", "ended": True}, {"id": "two", "ended": True}]
        assert await link.attach("one", 0, second) == result
        assert second.log == first.log
        later = RunOutput()
        assert await link.attach("one", first.log[0][0], later) == result
        assert later.log == first.log[1:]
        again = RunOutput()
        assert await run_over(link, job("one", "print('again')"), again) == result
        assert again.log == first.log
        link.acknowledge("one")
        with pytest.raises(ExecutorError) as refused:
            await run_over(link, job("one", "print('again')"), RunOutput())
        assert refused.value.code == "run_is_over"
        link.close()


async def test_executions_ended_by_a_shutdown_are_not_restored_as_results(
    bubblewrap: str, tmp_path: Path
) -> None:
    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        running = asyncio.create_task(
            run_over(link, job("one", "input()", stdin_open=True), RunOutput())
        )
        await asyncio.sleep(0)
        await link.call("shutdown")
        assert (await running)["reason"] == "shutdown"
        await asyncio.to_thread(program.process.wait)

    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        assert link.hello["runs"] == []
        assert (await run_over(link, job("one", "print(1)"), RunOutput()))["exit_code"] == 0
        link.close()


async def test_a_terminal_s_log_is_restored_with_its_numbers(
    bubblewrap: str, tmp_path: Path
) -> None:
    code = "for n in range(3000): print(n, 'x' * 500, flush=True)"
    request = job("one", code, terminal=[24, 80], output_limit=200_000)
    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        result = await run_over(link, request, RunOutput())
        first = RunOutput()
        assert await link.attach("one", 0, first) == result
        assert first.log[0][0] > 1
        link.close()

    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        second = RunOutput()
        assert await link.attach("one", 0, second) == result
        assert second.log == first.log
        link.close()


async def test_an_executor_starts_with_a_journal_full_of_garbage(
    bubblewrap: str, tmp_path: Path
) -> None:
    for number in (0, 1):
        (tmp_path / f"journal.{number}").write_bytes(bytes(range(256)) * 4096)
    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect_released()
        assert link.hello["runs"] == []
        assert (await run_over(link, job("one", "print(1)"), RunOutput()))["exit_code"] == 0
        link.close()
    with executor(bubblewrap, tmp_path, journal=True) as program:
        link = await program.connect()
        assert link.hello["runs"] == [{"id": "one", "ended": True}]
        link.close()


@pytest.mark.slow
async def test_a_result_is_in_the_journal_before_it_is_sent(
    bubblewrap: str, tmp_path: Path
) -> None:
    for turn in range(5):
        name = f"run{turn}"
        with executor(bubblewrap, tmp_path, journal=True) as program:
            link = await program.connect_released()
            await run_over(link, job(name, "print(1)"), RunOutput())
            program.process.kill()
            await asyncio.to_thread(program.process.wait)
        with executor(bubblewrap, tmp_path, journal=True) as program:
            link = await program.connect()
            assert {"id": name, "ended": True} in link.hello["runs"]
            link.close()
