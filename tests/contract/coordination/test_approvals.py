"""Questions to people: answered once, never missed, never waited for in vain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.coordination.base import CANCELLED, MAX_PAYLOAD_SIZE, SHUTDOWN
from atoll.errors import TooLarge

from .backend import LONG, Backend, until

pytestmark = pytest.mark.anyio

QUESTION = {"tool": "rm", "arguments": ["-r", "ø"]}
YES: dict[str, Any] = {"approved": True}
NO: dict[str, Any] = {"approved": False, "reason": "no"}


async def until_asked(backend: Backend, execution_id: str = "e") -> None:
    async def asked() -> bool:
        return await backend.b.question(execution_id) is not None

    await until(asked)


async def test_an_answer_from_another_replica_arrives_and_counts_once(backend: Backend) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    assert await backend.b.question("e") == QUESTION

    assert await backend.b.resolve("e", YES) == "resolved"
    assert await backend.a.resolve("e", NO) == "already"
    assert await asked == YES
    assert await backend.b.resolve("e", NO) == "already"
    assert await backend.a.question("e") is None


async def test_an_answer_to_a_different_question_does_not_count(backend: Backend) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    other = {**QUESTION, "id": "other"}
    assert await backend.b.resolve("e", YES, question=other) == "gone"
    seen = await backend.b.question("e")
    assert await backend.b.resolve("e", YES, question=seen) == "resolved"
    assert await asked == YES
    assert await backend.b.resolve("e", NO, question=other) == "gone"
    assert await backend.b.resolve("e", NO, question=seen) == "already"


async def test_an_answer_without_a_question_returns_gone(backend: Backend) -> None:
    assert await backend.a.resolve("e", YES) == "gone"
    assert await backend.a.question("e") is None


async def test_an_unanswered_question_expires(backend: Backend) -> None:
    assert await backend.a.ask("e", QUESTION, timeout=0.05) is None
    assert await backend.b.question("e") is None
    assert await backend.b.resolve("e", YES) == "gone"


async def test_an_answer_sent_while_the_question_is_stored_is_received(
    backend: Backend,
) -> None:
    for number in range(20):
        execution_id = f"e{number}"

        async def resolve(execution_id: str = execution_id) -> None:
            async def resolved() -> bool:
                return await backend.b.resolve(execution_id, YES) == "resolved"

            await until(resolved)

        async with asyncio.TaskGroup() as group:
            group.create_task(resolve())
            assert await backend.a.ask(execution_id, QUESTION, timeout=LONG) == YES


async def test_only_one_of_two_concurrent_answers_counts(backend: Backend) -> None:
    for number in range(10):
        execution_id = f"e{number}"
        asked = asyncio.create_task(backend.a.ask(execution_id, QUESTION, timeout=LONG))
        await until_asked(backend, execution_id)
        answers = [YES, NO, YES, NO]
        outcomes = await asyncio.gather(
            *(
                replica.resolve(execution_id, answer)
                for replica, answer in zip([backend.a, backend.b] * 2, answers, strict=True)
            )
        )
        assert sorted(outcomes) == ["already", "already", "already", "resolved"]
        assert await asked == answers[outcomes.index("resolved")]


async def test_a_cancelled_execution_gets_an_answer_to_its_question(backend: Backend) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    await backend.b.cancel("e", "user")
    assert await asked == CANCELLED
    assert await backend.b.resolve("e", YES) == "already"


async def test_a_question_of_a_cancelled_execution_is_answered_at_once(backend: Backend) -> None:
    await backend.b.cancel("e", "user")
    assert await backend.a.ask("e", QUESTION, timeout=LONG) == CANCELLED
    assert await backend.b.question("e") is None


async def test_an_answer_before_the_cancellation_counts(backend: Backend) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    await asyncio.gather(backend.b.resolve("e", YES))
    await backend.b.cancel("e", "user")
    assert await asked == YES


async def test_shutdown_answers_the_questions_of_its_replica(backend: Backend) -> None:
    here = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    there = asyncio.create_task(backend.b.ask("f", QUESTION, timeout=LONG))
    await until_asked(backend, "e")
    await until_asked(backend, "f")
    await backend.a.shutdown()
    assert await here == SHUTDOWN
    assert await backend.b.resolve("e", YES) == "gone"
    assert await backend.a.ask("g", QUESTION, timeout=LONG) == SHUTDOWN
    assert await backend.b.resolve("f", YES) == "resolved"
    assert await there == YES


async def test_a_question_is_removed_when_its_caller_is_cancelled(backend: Backend) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await backend.b.question("e") is None
    assert await backend.b.resolve("e", YES) == "gone"


async def test_a_question_of_a_lost_replica_is_removed(backend: Backend) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    await backend.die(backend.a)
    assert await backend.b.question("e") is None
    assert await backend.b.resolve("e", YES) == "gone"
    asked.cancel()
    await asyncio.wait({asked})


async def test_a_later_question_replaces_an_earlier_one(backend: Backend) -> None:
    earlier = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    later = asyncio.create_task(backend.b.ask("e", {"tool": "ls"}, timeout=LONG))
    assert await earlier is None
    assert await backend.a.question("e") == {"tool": "ls"}
    assert await backend.a.resolve("e", YES) == "resolved"
    assert await later == YES


async def test_an_oversized_question_or_answer_is_refused(backend: Backend) -> None:
    long = {"text": "ø" * MAX_PAYLOAD_SIZE}
    with pytest.raises(TooLarge):
        await backend.a.ask("e", long, timeout=LONG)
    with pytest.raises(TooLarge):
        await backend.a.resolve("e", long)


async def test_another_replica_that_repeats_a_question_gets_the_stored_answer(
    backend: Backend,
) -> None:
    asked = asyncio.create_task(backend.a.ask("e", QUESTION, timeout=LONG))
    await until_asked(backend)
    assert await backend.b.resolve("e", YES) == "resolved"
    assert await asked == YES
    # Before it passed the answer on.
    await backend.die(backend.a)

    assert await backend.b.ask("e", QUESTION, timeout=LONG) == YES


async def test_an_answer_does_not_count_for_another_question(backend: Backend) -> None:
    for asker, question in (
        (backend.a, QUESTION),
        (backend.b, {"tool": "ls"}),
        (backend.b, QUESTION),
    ):
        asked = asyncio.create_task(asker.ask("e", question, timeout=LONG))
        await until_asked(backend)
        assert not asked.done()
        assert await backend.b.resolve("e", YES) == "resolved"
        assert await asked == YES
