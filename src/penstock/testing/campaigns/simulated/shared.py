"""C1s: the same lives, of consumers that share a subscription: up to three in each of up to three processes.

They come and go all the time, as in C1, and with each of them slots or claims go from one process to another. How many
consumers there are, and whether they share by key or take whatever comes next, the seed decides.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.simulated import run

SHARED: Final[dict[str, Any]] = {"mode": None, "consumers": None}
"""What `live` and `replay` are given for such a life."""

CAMPAIGN = Campaign(
    name="c1s",
    title="delivery to consumers that share a subscription, in the deterministic simulator",
    unit="seed",
    small=500,
    full=20_000,
    run=partial(run, **SHARED),
)
