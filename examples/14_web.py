"""In a web application: the subscribers run while it does. FastAPI takes `lifespan=bus.lifespan` just so.

It needs Starlette, and httpx to call itself without a server; without them it says so.

It prints::

    201 signups/0@0
    mail to ada@example.com
"""

from __future__ import annotations

import asyncio
import sys

from penstock import Bus, Topic

try:
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
except ImportError as missing:
    sys.exit(f"this example needs starlette and httpx: pip install starlette httpx ({missing})")

signups = Topic("signups", bytes)
bus = Bus("memory:", topics=[signups])
mails: asyncio.Queue[str] = asyncio.Queue()


@bus.subscriber(signups, "welcome")
async def welcome(address: bytes) -> None:
    mails.put_nowait(f"mail to {address.decode()}")


async def sign_up(request: Request) -> PlainTextResponse:
    receipt = await bus.publish(signups, await request.body())
    return PlainTextResponse(str(receipt.position), status_code=201)


app = Starlette(routes=[Route("/signups", sign_up, methods=["POST"])], lifespan=bus.lifespan)


async def main() -> None:
    # What a server does: it begins the application, lets it answer, and ends it.
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            answer = await client.post("/signups", content=b"ada@example.com")
            print(answer.status_code, answer.text)
        print(await mails.get())


if __name__ == "__main__":
    asyncio.run(main())
