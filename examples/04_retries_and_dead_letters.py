"""What a handler raises decides what becomes of its event; what is given up is kept, looked at, and brought back.

It prints::

    attempts: fine 1, flaky 3, later 2, refused 1, broken 3
    2 dead: {'KeyError': 1, 'Reject': 1}
    1 x KeyError, at payments/0@4, after 3 attempts
    1 brought back: broken is paid, replay 1
    1 dead
"""

from __future__ import annotations

import asyncio
from collections import Counter

from penstock import (
    Bus,
    DeadGroup,
    DeadLetter,
    DeadLetters,
    DeadStats,
    Delivery,
    Reject,
    Replayed,
    Retry,
    RetryLater,
    Topic,
)

payments = Topic("payments", bytes)
bus = Bus("memory:", topics=[payments])
attempts: Counter[str] = Counter()
repaired = False
done: asyncio.Queue[str] = asyncio.Queue()


@bus.subscriber(payments, "bank", retry=Retry(max_retries=2, delay=0.01))
async def pay(data: bytes, delivery: Delivery[bytes]) -> None:
    what = data.decode()
    attempts[what] += 1
    if what == "refused":
        done.put_nowait(what)
        raise Reject("there is no such account")  # no attempt can succeed: a dead letter at once
    if what == "later" and delivery.attempt == 1:
        raise RetryLater(0.02, "the bank asks to wait")  # not the policy, but the handler says when
    if what == "flaky" and delivery.attempt < 3:
        raise ConnectionError("nobody answers")  # tried again as `retry` says
    if what == "broken" and not repaired:
        if delivery.attempt == 3:
            done.put_nowait(what)
        raise KeyError("currency")  # the third failure is the last one
    done.put_nowait(f"{what} is paid, replay {delivery.replay}")


async def main() -> None:
    global repaired  # noqa: PLW0603 - it stands for a deployment of a better version
    kinds = ("fine", "flaky", "later", "refused", "broken")
    async with bus:
        for what in kinds:
            await bus.publish(payments, what.encode(), key=what)
        for _ in kinds:
            await done.get()
        print("attempts:", ", ".join(f"{what} {attempts[what]}" for what in kinds))

        letters: DeadLetters = bus.dead_letters
        while await letters.count(payments, "bank") < 2:  # noqa: ASYNC110 - the last verdict is just being written
            await asyncio.sleep(0.01)
        stats: DeadStats = (await letters.stats(payments))[0]
        print(stats.dead, "dead:", dict(sorted(stats.errors.items())))
        group: DeadGroup = (await letters.groups(payments, "bank", error="KeyError"))[0]
        letter: DeadLetter = await letters.show(payments, "bank", group.sample.offset)
        print(f"{group.count} x {group.error_type}, at {letter.position}, after {letter.attempts} attempts")

        repaired = True
        replayed: Replayed = await letters.replay(payments, "bank", fingerprint=group.fingerprint)
        print(replayed.replayed, "brought back:", await done.get())
        print(await letters.count(payments, "bank"), "dead")


if __name__ == "__main__":
    asyncio.run(main())
