"""Traced: handlers and publishes as spans, under the names that OpenTelemetry gives them."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanKind, StatusCode
from tests.deliveries import kept, raw

from penstock import Topic
from penstock.bus.middleware.tracing import SCHEMA_URL, Traced, trace_headers
from penstock.errors import StaleDelivery, UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from tests.deliveries import World

    from penstock import Delivery
    from penstock.bus.middleware import Middleware

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """A tracer, and the spans that it has made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def spans() -> Spans:
    return Spans()


async def delivered(world: World, **fields: Any) -> Delivery[Any]:
    bus = world.bus()
    await world.publish(bus, b"the secret payload", key="secret key", **fields)
    async with world.running(bus.consume(raw, "billing"), kept) as running:
        await world.until(lambda: running.taken)
    return running.deliveries[0]


async def nothing() -> None:
    """Handle an event."""


async def test_an_attempt_is_a_span_of_a_consumer_with_the_names_of_the_conventions(world: World, spans: Spans) -> None:
    traced: Middleware = Traced(spans.tracer)
    delivery = await delivered(world, id="e-1")
    await traced(delivery, nothing)
    [span] = spans.ended
    assert (span.name, span.kind) == ("process raw", SpanKind.CONSUMER)
    assert span.attributes == {
        names.MESSAGING_SYSTEM: "penstock",
        names.MESSAGING_OPERATION_NAME: "process",
        names.MESSAGING_OPERATION_TYPE: names.MessagingOperationTypeValues.PROCESS.value,
        names.MESSAGING_DESTINATION_NAME: "raw",
        names.MESSAGING_DESTINATION_PARTITION_ID: "0",
        names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: "billing",
        names.MESSAGING_MESSAGE_ID: "e-1",
        "penstock.offset": 0,
        "penstock.attempt": 1,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert (span.parent, span.links) == (None, ())


async def test_a_span_links_to_what_published_the_event_and_is_not_its_child(world: World, spans: Spans) -> None:
    delivery = await delivered(world, headers={"traceparent": PARENT, "tracestate": "vendor=1"})
    await Traced(spans.tracer)(delivery, nothing)
    [span] = spans.ended
    assert span.parent is None
    [link] = span.links
    assert trace.format_trace_id(link.context.trace_id) == "0af7651916cd43dd8448eb211c80319c"
    assert trace.format_span_id(link.context.span_id) == "b7ad6b7169203331"
    assert link.context.trace_state == {"vendor": "1"}
    assert span.context.trace_id != link.context.trace_id


async def test_the_handler_runs_in_the_span(world: World, spans: Spans) -> None:
    delivery = await delivered(world)

    async def handle() -> None:
        with spans.tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)

    with spans.tracer.start_as_current_span("outside") as outside:
        await Traced(spans.tracer)(delivery, handle)
    inside, process, _ = spans.ended
    assert inside.parent is not None
    assert process.parent is not None
    assert inside.parent.span_id == process.context.span_id
    assert process.parent.span_id == outside.get_span_context().span_id


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("the secret payload"), "ValueError"),
        (StaleDelivery("a shard", "secret"), "penstock.errors.StaleDelivery"),
        (asyncio.CancelledError("secret"), "asyncio.exceptions.CancelledError"),
    ],
)
async def test_a_failure_has_its_kind_and_not_its_text(
    world: World, spans: Spans, error: BaseException, kind: str
) -> None:
    delivery = await delivered(world)

    async def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await Traced(spans.tracer)(delivery, fail)
    [span] = spans.ended
    assert span.attributes is not None
    assert span.attributes[ERROR_TYPE] == kind
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert span.events == ()
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    "parent", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", b"\xff\xfe", "x" * 10_000]
)
async def test_a_header_that_makes_no_sense_is_no_link(world: World, spans: Spans, parent: str | bytes) -> None:
    delivery = await delivered(world, headers={"traceparent": parent})
    with spans.tracer.start_as_current_span("outside"):
        await Traced(spans.tracer)(delivery, nothing)
    assert spans.ended[0].links == ()


# --- publishing -------------------------------------------------------------------------------


async def test_from_a_publish_to_its_handler(world: World, spans: Spans) -> None:
    traced = Traced(spans.tracer)
    with traced.sending(raw) as headers:
        delivery = await delivered(world, headers=headers)
    await traced(delivery, nothing)
    send, process = spans.ended
    assert (send.name, send.kind) == ("send raw", SpanKind.PRODUCER)
    assert send.attributes == {
        names.MESSAGING_SYSTEM: "penstock",
        names.MESSAGING_OPERATION_NAME: "send",
        names.MESSAGING_OPERATION_TYPE: names.MessagingOperationTypeValues.SEND.value,
        names.MESSAGING_DESTINATION_NAME: "raw",
    }
    assert [link.context.span_id for link in process.links] == [send.context.span_id]


def test_a_publish_that_fails_and_one_of_many(spans: Spans) -> None:
    traced = Traced(spans.tracer)
    with pytest.raises(ZeroDivisionError), traced.sending("orders", count=3):
        raise ZeroDivisionError
    [span] = spans.ended
    assert span.attributes is not None
    assert (span.name, span.attributes[names.MESSAGING_BATCH_MESSAGE_COUNT]) == ("send orders", 3)
    assert span.attributes[ERROR_TYPE] == "ZeroDivisionError"


def test_the_headers_of_the_current_span_are_those_that_cloudevents_names(spans: Spans) -> None:
    assert trace_headers() == {}
    with spans.tracer.start_as_current_span("request") as span:
        headers = trace_headers()
    context = span.get_span_context()
    trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    assert list(headers) == ["traceparent"]
    assert headers["traceparent"].startswith(f"00-{trace_id}-{span_id}-")


# --- the version of the names -----------------------------------------------------------------


def test_the_schema_is_pinned_to_a_version_that_has_these_names() -> None:
    assert SCHEMA_URL in {schema.value for schema in Schemas}


def test_without_a_tracer_it_is_that_of_the_global_provider_with_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with Traced().sending(Topic("orders", bytes)):
        pass
    [span] = exporter.get_finished_spans()
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "penstock"
    assert span.instrumentation_scope.version
    assert span.instrumentation_scope.schema_url == SCHEMA_URL


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    for made in (Traced, trace_headers):
        with pytest.raises(UsageError, match=r"pip install 'penstock\[otel\]'"):
            made()
