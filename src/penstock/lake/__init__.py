"""The lake: topics as Parquet files, beside the log and beyond it. Needs no Spark, neither to write nor to read.

What a lake is on a disk::

    lake/
      topic=orders/date=2026-01-31/<log id>-<partition>-<start>-<stop>-<token>.parquet
      _lake/v00000000000000000007          the manifest: which files there are, version by version
      _lake/files/                         files on their way in, and on their way out

* **A file** holds consecutive events of one partition that were appended on one day (UTC), all columns of an event but
  `topic`, which is in the path: pandas, DuckDB, Polars and Spark read the directory as it stands. Its name says which
  offsets it has, `start` up to but without `stop`. The token is chance: no two writers ever make the same file.
* **The manifest** decides what is in the lake. It names every file with its range, times, sizes and a digest of its
  content, and the gaps that the log declared. The next version is put if it is absent (`penstock.versions`), so that
  of two archivers one wins, and the other adds what is still missing to what holds then.
* **A file is hidden until the manifest names it**, and hidden again before it is removed. So what a glob finds in the
  directory is never there twice, and after a crash at any moment at worst not there yet: the next archiver moves it.
  Whoever reads by the manifest, as everything here does, looks in both places.
* **A digest of the content**, not of the file: it is of the columns, so that it can be compared with the log's.

`entries` has the manifest, `plan` decides what is to be written (both without I/O), `content` and `files` write and
read Parquet, `lake` is the directory, `reading` makes one of lake and log, `verify` compares them.
"""
