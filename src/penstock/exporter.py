"""The exporter: the metrics of a bus for Prometheus. Needs the extra `metrics`; importing this module does not.

`PrometheusCollector` is for applications that serve metrics already, and register it with their own registry::

    from prometheus_client import REGISTRY

    REGISTRY.register(PrometheusCollector(bus))

`serve_metrics` is for those that do not: a small HTTP server in a thread. It has neither TLS nor authentication, so it
listens on this machine alone, unless somebody says that he knows what he does.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from penstock.errors import MetricsUnavailable, PenstockError, UsageError
from penstock.metrics import BOUNDS, CATALOGUE, PORT, PREFIX, Buckets, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType, TracebackType
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from penstock.metrics import Source

logger = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0
"""How long a client may take to say what it wants."""
REQUESTS_MAX: Final = 8
"""So many are answered at a time; others wait in line."""
PATHS: Final = ("/metrics", "/")
PLAIN: Final = ("Content-Type", "text/plain; charset=utf-8")


def _client() -> ModuleType:
    try:
        import prometheus_client
    except ImportError:
        raise MetricsUnavailable("prometheus-client is not installed: pip install 'penstock[metrics]'") from None
    return prometheus_client


class PrometheusCollector:
    """What a registry of `prometheus_client` asks for the metrics of a bus, or of any other source.

    A bus that is not open tells its version alone. Two buses need two registries: their metrics have the same names.
    """

    def __init__(self, source: Source) -> None:
        _client()
        self._source = source

    def describe(self) -> Iterator[Family]:
        """Yield every metric that there may be, without values: a registry asks when it is registered."""
        for family in CATALOGUE:
            yield _family(Metric(PREFIX + family.name, family.kind, family.help, family.labels, ()))

    def collect(self) -> Iterator[Family]:
        """Yield the metrics as they are now."""
        for metric in self._source.latest_metrics():
            yield _family(metric)


def _family(metric: Metric) -> Family:
    from prometheus_client.metrics_core import Metric as Family

    # A family of counters goes without the suffix that its samples have.
    family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
    for values, value in metric.samples:
        labels = dict(zip(metric.labels, values, strict=True))
        if isinstance(value, Buckets):
            for bound, count in zip((*BOUNDS, math.inf), value.counts, strict=True):
                family.add_sample(f"{metric.name}_bucket", {**labels, "le": _bound(bound)}, count)
            if value.sum is not None:  # by OpenMetrics, both or none
                family.add_sample(f"{metric.name}_count", labels, value.counts[-1])
                family.add_sample(f"{metric.name}_sum", labels, value.sum)
        else:
            family.add_sample(metric.name, labels, value)
    return family


def _bound(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(bound)


class _Given:
    """Metrics that were asked for already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = list(metrics)

    def latest_metrics(self) -> list[Metric]:
        return self._metrics


def to_text(metrics: Sequence[Metric]) -> str:
    """Return metrics in the text format of Prometheus."""
    client = _client()
    text: bytes = client.generate_latest(_registry(_Given(metrics)))
    return text.decode()


def _registry(source: Source) -> CollectorRegistry:
    registry: CollectorRegistry = _client().CollectorRegistry()
    registry.register(PrometheusCollector(source))
    return registry


# --- serving ----------------------------------------------------------------------------------


def serve_metrics(
    source: Source, *, host: str = "127.0.0.1", port: int = PORT, insecure: bool = False
) -> MetricsServer:
    """Serve the metrics of a bus over HTTP, at `/metrics`, until the server that is returned is closed.

    `port` 0 is any that is free. Topics and subscriptions have names that not everybody should read, and there is
    neither TLS nor authentication here: an address that other machines reach is refused, unless `insecure=True` says
    that something else protects it, such as a network of its own.
    """
    if not insecure and not _is_loopback(host):
        raise UsageError(
            f"{host!r} may be reached by other machines, and metrics are served without TLS and authentication: serve "
            f"them on 127.0.0.1 behind a proxy that has both, or say insecure=True (--insecure) if the network is safe"
        )
    if not 0 <= port <= 65_535:
        raise UsageError(f"a port is 0 to 65535, not {port}")
    return MetricsServer(_registry(source), host, port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name means what somebody else says


class MetricsServer:
    """An HTTP server in a thread; `close` it, or use it in a `with` block."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(family, address[:2], _application(registry))
        except OSError as error:
            raise MetricsUnavailable(f"metrics cannot be served on {host} port {port}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.port: int = self._server.server_address[1]
        """The one that it has, if any was asked for."""
        self.url = f"http://{shown}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="penstock-metrics", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<MetricsServer {self.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Serve no more; may be repeated. Must not be called where the event loop of the bus waits for it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    """Answers several at a time, and no more than so many."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, family: int, address: tuple[Any, ...], application: WSGIApplication) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__((str(address[0]), int(address[1])), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        # The one of `HTTPServer` would ask the network for this machine's name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for metrics ended early", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        logger.debug(format, *args)


def _application(registry: CollectorRegistry) -> WSGIApplication:
    answer: WSGIApplication = _client().make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") not in PATHS:
            start("404 Not Found", [PLAIN])
            return [b"metrics are at /metrics\n"]
        try:
            return answer(environ, start)
        except PenstockError as error:
            logger.warning("metrics could not be read: %s", error)
            start("503 Service Unavailable", [PLAIN])
            return [b"the metrics cannot be read now; the log says why\n"]

    return application
