"""A process that does one job: `python -m penstock.cli.bench.shards '<the job as JSON>'`."""

from __future__ import annotations

import sys

import msgspec

from penstock.cli.bench.shards.jobs import Job

msgspec.json.Decoder(Job).decode(sys.argv[1]).run()
