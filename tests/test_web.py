"""The promises of `bus.lifespan`: subscribers run while a web application runs, and drain when it ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock import Bus, Delivery, Topic
from penstock.errors import BusClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PATIENCE_SECONDS = 30.0


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, root: Path) -> str:
    return "memory:" if request.param == "memory" else f"file:{root}"


class Shop:
    """A bus with a handler that tells what it does, and waits for the test where it is told to."""

    def __init__(self, url: str) -> None:
        self.orders = Topic("orders", bytes)
        self.bus = Bus(url, topics=[self.orders])
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.handled: list[bytes] = []
        self.done = asyncio.Event()

        @self.bus.subscriber(self.orders, "billing", heartbeat="debug")
        async def bill(order: bytes, delivery: Delivery[bytes]) -> None:
            self.begun.set()
            if order == b"slow":
                await self.may_end.wait()
            self.handled.append(order)
            self.done.set()


def fastapi_of(shop: Shop) -> FastAPI:
    app = FastAPI(lifespan=shop.bus.lifespan)

    @app.post("/orders/{name}")
    async def place(name: str) -> dict[str, int]:
        receipt = await shop.bus.publish(shop.orders, name.encode())
        return {"offset": receipt.positions[0].offset}

    return app


def starlette_of(shop: Shop) -> Starlette:
    async def place(request: Request) -> JSONResponse:
        receipt = await shop.bus.publish(shop.orders, request.path_params["name"].encode())
        return JSONResponse({"offset": receipt.positions[0].offset})

    return Starlette(routes=[Route("/orders/{name}", place, methods=["POST"])], lifespan=shop.bus.lifespan)


class Served:
    """An application with its lifespan, as a server runs it, and a client of it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")

    async def start(self) -> dict[str, Any]:
        """Start it, and return what it says to that."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.ensure_future(self._app(scope, self._asked.get, self._answers.put))
        return await self._tell("lifespan.startup")

    async def stop(self) -> dict[str, Any]:
        """End it, and return what it says to that."""
        answer = await self._tell("lifespan.shutdown")
        await self._task
        await self.client.aclose()
        return answer

    async def _tell(self, type_: str) -> dict[str, Any]:
        await self._asked.put({"type": type_})
        return await asyncio.wait_for(self._answers.get(), PATIENCE_SECONDS)


APPLICATIONS = pytest.mark.parametrize("made", [fastapi_of, starlette_of])


@APPLICATIONS
async def test_a_route_publishes_and_a_subscriber_of_the_same_application_handles_it(made: Any, url: str) -> None:
    shop = Shop(url)
    served = Served(made(shop))
    assert await served.start() == {"type": "lifespan.startup.complete"}
    answer = await served.client.post("/orders/first")
    assert (answer.status_code, answer.json()) == (200, {"offset": 0})
    await asyncio.wait_for(shop.done.wait(), PATIENCE_SECONDS)
    assert await served.stop() == {"type": "lifespan.shutdown.complete"}
    assert shop.handled == [b"first"]


@APPLICATIONS
async def test_the_end_of_the_application_waits_for_a_handler_and_closes_the_bus(made: Any, url: str) -> None:
    shop = Shop(url)
    served = Served(made(shop))
    await served.start()
    await served.client.post("/orders/slow")
    await asyncio.wait_for(shop.begun.wait(), PATIENCE_SECONDS)
    stopping = asyncio.ensure_future(served.stop())
    for _ in range(1_000):  # whatever it would do without waiting, it has done
        await asyncio.sleep(0)
    assert shop.handled == []
    assert not stopping.done()
    shop.may_end.set()
    assert await stopping == {"type": "lifespan.shutdown.complete"}
    assert shop.handled == [b"slow"]
    with pytest.raises(BusClosed):
        await shop.bus.publish(shop.orders, b"late")


@APPLICATIONS
async def test_nothing_runs_before_the_application_does(made: Any) -> None:
    shop = Shop("memory:")
    made(shop)
    assert "new" in repr(shop.bus)
    assert not shop.begun.is_set()


async def test_a_lifespan_of_ones_own_runs_the_bus_inside_of_it(url: str) -> None:
    shop = Shop(url)
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        steps.append("opened")
        async with shop.bus.lifespan(app):
            yield
        steps.append(f"closed after {len(shop.handled)}")

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders/{name}")
    async def place(name: str) -> None:
        await shop.bus.publish(shop.orders, name.encode())

    served = Served(app)
    await served.start()
    await served.client.post("/orders/first")
    await asyncio.wait_for(shop.done.wait(), PATIENCE_SECONDS)
    await served.stop()
    assert steps == ["opened", "closed after 1"]


async def test_a_store_that_cannot_be_opened_stops_the_application_from_starting(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file, and no directory")
    shop = Shop(f"file:{tmp_path / 'data'}")
    served = Served(fastapi_of(shop))
    answer = await served.start()
    assert answer["type"] == "lifespan.startup.failed"
    assert "data" in answer["message"]
    with pytest.raises(NotADirectoryError):
        await served._task
    await served.client.aclose()
