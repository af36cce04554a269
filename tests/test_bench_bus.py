"""The promises of `penstock bench bus`: all its figures, in the form; without the peer, all but its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.test_bench import check_form

from penstock.cli import main
from penstock.cli.bench import bus
from penstock.cli.bench.bus.sizes import Sizes

OURS = {
    "handlers.async": "value >= 100000 events/s",
    "handlers.keyed": "ratio >= 0.6",
    "handlers.dedupe": "ratio >= 0.6",
    "handlers.once": "ratio >= 0.7",
    "publisher.linger": "value >= 150000 events/s",
}
PEER = {"peer.faststream": "ratio >= 10", "peer.faststream.pull": "ratio >= 10"}
TINY = Sizes(handled_events=300, keys=20, batch_events=100, once_events=10, sent_events=500, peer_events=200, rounds=1)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bus, "SIZES", TINY)


@pytest.mark.filterwarnings("default")  # the peer and its client are others', and so are their warnings
def test_every_figure_is_told_in_the_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bus", "--json", "--rounds", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_form(document, "bus")
    assert {figure["name"]: figure["goal"] for figure in document["figures"]} == OURS | PEER
    assert list(tmp_path.iterdir()) == []


def test_without_the_peer_all_others_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "faststream.nats", None)
    assert main(["bench", "bus", "--json", "--rounds", "1"]) == 0
    told = capsys.readouterr()
    assert {figure["name"] for figure in json.loads(told.out)["figures"]} == set(OURS)
    assert "peer.faststream is left out" in told.err
