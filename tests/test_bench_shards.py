"""The promises of `penstock bench shards`: all its figures, in the form, and nothing lost or reordered meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.test_bench import check_form

from penstock.cli import main
from penstock.cli.bench import shards
from penstock.cli.bench.shards.sizes import Sizes

FIGURES = {
    "key_shared.four": "ratio >= 0.6",
    "shared.four": "ratio >= 0.8",
    "rebalance": "value <= 100 ms",
    "backlog": "ratio >= 0.8",
    "processes.two": "ratio >= 1.3",
    "takeover": "value <= 1000 ms",
}
TINY = Sizes(
    batch_events=50,
    read_batches=4,
    behind_batches=20,
    keys=200,
    behind_rounds=1,
    handled_events=4_000,
    process_rounds=1,
    events_per_second=500,
)


def test_every_figure_is_told_in_the_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "SIZES", TINY)
    assert main(["bench", "shards", "--json", "--rounds", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_form(document, "shards")
    assert {figure["name"]: figure["goal"] for figure in document["figures"]} == FIGURES
    assert list(tmp_path.iterdir()) == []
