"""A world for the tests of an application: its own bus, on a store in memory and a clock that moves when it is told to.

What a test holds is `penstock.testing.harness` and the `World` that it gives. From the bottom up: `faults` says what
may go wrong and decides when; `medium` is the store, which outlives every process; `watching` sees what handlers do;
`lives` are processes that begin and die; `waiting` says what is left to do; `judging` whether every promise held;
`world` puts them together. Above it `trials` runs events with and without faults, `effects` compares what came of them,
and `search` finds the handlers that differ, and the fewest faults that show it: `penstock chaos`.
"""
