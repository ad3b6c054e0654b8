"""Shows AsyncAtoll: eight sessions that run code at the same time."""

import asyncio

from atoll import AsyncAtoll

SESSIONS = 8


async def square(atoll: AsyncAtoll, number: int) -> int:
    async with atoll.session(memory="128Mi") as session:
        code = "def handler(event):\n    return event * event\n"
        result = await session.run(code, event=number)
        value: int = result.check().return_value
        return value


async def main() -> None:
    async with AsyncAtoll() as atoll:
        print(await asyncio.gather(*(square(atoll, number) for number in range(SESSIONS))))


asyncio.run(main())
