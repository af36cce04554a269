"""Traced: handlers and publishes as spans of OpenTelemetry. Needs the extra `otel`: `pip install 'penstock[otel]'`.

::

    traced = Traced()
    bus = Bus("file:./events", topics=[orders], middleware=[traced])

    with traced.sending(orders) as headers:
        await bus.publish(orders, order, headers=headers)

What this promises:

* An attempt at an event is a span `process <topic>` of a consumer, in which the handler runs. It *links* to whatever
  published the event, since the two may be days apart: the event carries that context as the headers `traceparent` and
  `tracestate`, the names that CloudEvents gives them.
* `sending` is a span `send <topic>` of a producer, and gives the headers that lead there. `trace_headers()` gives those
  of the current span, for whoever has one already.
* Names follow the semantic conventions for messaging. They are not final, so the version is pinned: `SCHEMA_URL`.
* A failure is `error.type`, the kind of error. Neither payload, key nor the text of an error becomes part of a span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

    from penstock.bus.delivered import Delivery
    from penstock.bus.middleware import Proceed
    from penstock.bus.topic import Topic

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions that the names of attributes are from."""

SYSTEM: Final = "penstock"
HEADERS: Final = ("traceparent", "tracestate")


class Traced:
    """Middleware that makes each attempt a span; and `sending`, which does it for a publish.

    `tracer`: what makes spans; that of the global provider unless given.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        _check_installed()
        from opentelemetry.trace import get_tracer

        self._tracer = tracer or get_tracer("penstock", version("penstock"), schema_url=SCHEMA_URL)

    async def __call__(self, delivery: Delivery[Any], proceed: Proceed, /) -> None:
        """See `Middleware`."""
        from opentelemetry.trace import Link, SpanKind

        position, producer = delivery.position, _context_of(delivery.headers)
        attributes: dict[str, str | int] = {
            **_operation("process", position.topic),
            "messaging.destination.partition.id": str(position.partition),
            "messaging.destination.subscription.name": delivery.subscription,
            "penstock.offset": position.offset,
            "penstock.attempt": delivery.attempt,
        }
        if delivery.event.id is not None:
            attributes["messaging.message.id"] = delivery.event.id
        links = [] if producer is None else [Link(producer)]
        with self._span(f"process {position.topic}", SpanKind.CONSUMER, attributes, links):
            await proceed()

    @contextmanager
    def sending(self, topic: Topic[Any] | str, *, count: int | None = None) -> Iterator[dict[str, str]]:
        """Make a block one span, in which something is published; give the headers by which the events lead to it.

        `count` says how many events, for those who publish a batch.
        """
        from opentelemetry.trace import SpanKind

        name = topic if isinstance(topic, str) else topic.name
        attributes: dict[str, str | int] = dict(_operation("send", name))
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        with self._span(f"send {name}", SpanKind.PRODUCER, attributes):
            yield trace_headers()

    @contextmanager
    def _span(self, name: str, kind: Any, attributes: dict[str, str | int], links: Any = ()) -> Iterator[Span]:
        # What an exception says is its message and its stack, and a message may quote the payload.
        with self._tracer.start_as_current_span(
            name, kind=kind, attributes=attributes, links=links, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                from opentelemetry.trace import StatusCode

                span.set_attribute("error.type", _kind_of(error))
                span.set_status(StatusCode.ERROR)
                raise


def trace_headers() -> dict[str, str]:
    """Return the context of the current span as headers: `publish(…, headers=trace_headers())`; none without a span."""
    _check_installed()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    # By name and not as the program has configured it: these two are what CloudEvents knows.
    TraceContextTextMapPropagator().inject(headers)
    return headers


def _context_of(headers: Mapping[str, bytes]) -> SpanContext | None:
    """Return the context that an event was published in; None if it carries none, or none that makes sense."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carried = {name: headers[name].decode("ascii", "replace") for name in HEADERS if name in headers}
    if not carried:
        return None
    found = get_current_span(TraceContextTextMapPropagator().extract(carried)).get_span_context()
    return found if found.is_valid else None


def _operation(name: str, topic: str) -> dict[str, str]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": name,
        "messaging.destination.name": topic,
    }


def _kind_of(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _check_installed() -> None:
    try:
        import opentelemetry.trace  # noqa: F401 - that it is there is all that matters
    except ImportError:
        raise UsageError("tracing needs OpenTelemetry: pip install 'penstock[otel]'") from None
