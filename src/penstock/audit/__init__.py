"""Audit: what the ledger proves of every event of a subscription, by arithmetic on ranges.

The cursor of a subscription says what was passed. Settlement records say, one after the other and without a hole, what
was settled on the way. An audit compares the two, and says of each offset one of these:

* **proven**: a record says how it ended, and that holds since;
* **parked**: it is kept aside, and waits;
* **pending**: the cursor has not passed it;
* **unproven**: the cursor has passed it, no record says how, and a record is missing that may have said so;
* **lost**: the cursor has passed it, no record says how, and none is missing that could have.

`lost` is an accusation, so it is only made where every other explanation is ruled out. A process that was killed, a
consumer that is at work while one looks, and a ledger of which the oldest part is gone never lead to it.

Nothing here knows Spark, and nothing becomes a row per event. From the bottom up:

| module | what it is |
| --- | --- |
| `spans` | sets of offsets as sorted arrays of bounds: union, difference, what is covered twice |
| `records` | settlement records as columns, decoded many at a time |
| `evidence` | what the records of a shard say together; parts of it are made anywhere, and joined in order |
| `facts` | what a store says now, looked at in an order in which a bus at work cannot look like a loss |
| `judging` | facts and evidence become verdicts |
| `results` | what is reported, as plain values |
| `report/` | the same as one HTML page |
"""
