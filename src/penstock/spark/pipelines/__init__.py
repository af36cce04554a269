"""Pipelines: whatever moves or examines events in bulk. Each is a command, `penstock pipeline …`, and a function here.

All of them are made alike:

* **A round is all there is to do now.** It looks at what there is, at what was done before, and does the rest. What was
  done is written where the result is, in one step with it, and nowhere else: there is no checkpoint to lose.
* **Stopped at any moment, by any signal, nothing is lost or doubled.** The next round finds what is missing.
* **Two at once are harmless**: of two that do the same, one result counts, and the other is thrown away.
* **Spark where there is much, columns everywhere**: plans are made in the driver, of ranges and never of rows; rows are
  read, folded and written in tasks, as Arrow.
"""
