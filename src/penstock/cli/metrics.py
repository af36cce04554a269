"""`penstock metrics`: what a store tells, for Prometheus: once, or for as long as it runs. Needs no handlers.

It looks at the store and nothing else: it neither publishes nor consumes, and takes no lease. What only the processes
know that do (such as how long handlers take) is exported by them, with `penstock.exporter.serve_metrics(bus)`.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import print_json, say
from penstock.cli.session import Session
from penstock.errors import MetricsUnavailable, UsageError
from penstock.metrics import PORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.metrics import Metric


def metrics(
    context: typer.Context,
    *,
    port: Annotated[int, typer.Option(min=0, max=65_535, metavar="PORT", help="Serve on this port; 0 for any.")] = PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Serve on this address.")] = "127.0.0.1",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines reach, without TLS.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics, and serve nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON document.")] = False,
) -> None:
    """Export what a store tells to Prometheus: lags, ages, dead letters.

    Without --once it serves http://127.0.0.1:9464/metrics until it is interrupted.
    """
    from penstock.clock import SystemClock
    from penstock.runtime.gauges import StoreMetrics

    if as_json and not once:
        raise UsageError("--json goes with --once: what is served has the format that Prometheus asks for")
    with context.ensure_object(Session).open_store() as (store, _):
        source = StoreMetrics(store, SystemClock())
        if once:
            _print(source.latest_metrics(), as_json=as_json)
        else:
            _serve(source, host, port, insecure=insecure)


def _print(found: Sequence[Metric], *, as_json: bool) -> None:
    if as_json:
        print_json({"metrics": _plain(found)})
    else:
        from penstock.exporter import to_text

        print(to_text(found), end="")
    if any(each.name == "penstock_store_up" and not each.samples[0].value for each in found):
        raise MetricsUnavailable("the store cannot be looked at: `penstock doctor` and `penstock verify` know more")


def _serve(source: Any, host: str, port: int, *, insecure: bool) -> None:
    from penstock.exporter import serve_metrics

    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: ended.set())
    try:
        with serve_metrics(source, host=host, port=port, insecure=insecure) as server:
            say(f"serving {server.url}; Ctrl-C ends it")
            ended.wait()  # Ctrl-C interrupts it
    finally:
        signal.signal(signal.SIGTERM, before)


def _plain(found: Sequence[Metric]) -> list[dict[str, Any]]:
    from penstock.metrics import BOUNDS, Buckets

    def shown(value: float | Buckets) -> Any:
        if not isinstance(value, Buckets):
            return value
        return {"bounds": BOUNDS, "counts": value.counts, "sum": value.sum}

    return [
        {
            "name": each.name,
            "kind": each.kind,
            "help": each.help,
            "samples": [
                {"labels": dict(zip(each.labels, sample.labels, strict=True)), "value": shown(sample.value)}
                for sample in each.samples
            ],
        }
        for each in found
    ]
