"""Registers `format("penstock")` with Spark: every installed package named `pyspark_*` is asked for a `DefaultSource`.

Spark imports them all at the first lookup of any data source. If one fails, so does the lookup, also for people who do
not use it. So whatever is missing or broken here, this module only has no `DefaultSource` then; `penstock.spark` tells
what is wrong to whoever asks it.
"""

from contextlib import suppress

with suppress(Exception):
    from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
