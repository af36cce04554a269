"""A Spark standalone cluster on this machine, from nothing but pip's pyspark: one master, two workers.

It listens on loopback only, on ports that are free, and prints the URL of its master. It runs until Ctrl-C or SIGTERM,
or as long as a program that it is given, which finds the URL in `SPARK_MASTER`: `penstock.spark.session()` takes it
from there.

    python examples/spark_cluster.py
    python examples/spark_cluster.py --workers 3 --run my_job.py --its-option 1

Or in a program: `with Cluster(workers=2) as cluster: session(cluster.url)`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

import pyspark

from penstock.spark.java import use_java

HOST = "127.0.0.1"
READY_SECONDS = 60.0
END_SECONDS = 15.0
POLL_SECONDS = 0.05

# What is waited for is read from what the processes log, so how they log must not depend on the machine's settings.
LOGGING = """\
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d %p %c{1}: %m%n%ex
"""


class Cluster:
    """One master and some workers, as a context: they run inside of it, and none outlives it.

    :param memory_mib: of each worker, for its executors together; Spark gives an executor 1 GiB unless told otherwise.
    :param directory: where logs and the executors' files go; without one, a temporary directory that is deleted.
    """

    def __init__(
        self, workers: int = 2, *, cores: int = 1, memory_mib: int = 1024, directory: Path | None = None
    ) -> None:
        self.url = ""
        self.directory = directory or Path(tempfile.mkdtemp(prefix="penstock-cluster-"))
        self._is_temporary = directory is None
        self._workers = workers
        self._worker_options = ["--cores", str(cores), "--memory", f"{memory_mib}m"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            use_java()
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "log4j2.properties").write_text(LOGGING)
            self._start("master", "org.apache.spark.deploy.master.Master")
            self.url = self._hear("master", r"Starting Spark master at (spark://\S+)")
            names = [f"worker-{number}" for number in range(1, self._workers + 1)]
            for name in names:
                options = [*self._worker_options, "--work-dir", str(self.directory / name), self.url]
                self._start(name, "org.apache.spark.deploy.worker.Worker", *options)
            for name in names:
                self._hear(name, r"(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The processes of the master and the workers, in the order in which they were started."""
        return [process.pid for process in self._processes.values()]

    def stop(self) -> None:
        """End what was started, workers before the master; a worker ends its executors. May be called again."""
        for process in reversed(self._processes.values()):
            process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for process in reversed(self._processes.values()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, name: str, java_class: str, *arguments: str) -> None:
        home = Path(pyspark.__file__).parent
        program = str(home / "bin" / "spark-class")
        command = [program, java_class, "--host", HOST, "--port", "0", "--webui-port", "0", *arguments]
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_PUBLIC_DNS": HOST,
            "SPARK_DAEMON_MEMORY": "256m",  # of the process itself; a worker's executors have theirs besides
            "LOG4J_CONFIGURATION_FILE": (self.directory / "log4j2.properties").absolute().as_uri(),
        }
        # An older configuration of this machine's would reach the processes through these.
        for variable in ("SPARK_MASTER_HOST", "SPARK_MASTER_PORT", "SPARK_WORKER_PORT", "SPARK_CONF_DIR"):
            environment.pop(variable, None)
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603 - pyspark's own program
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which then ends them in order
            )

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _hear(self, name: str, pattern: str) -> str:
        """Wait until a process has logged this, and return what the group matched."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            ended = self._processes[name].poll()
            log = self._log(name).read_text(errors="replace")
            if heard := re.search(pattern, log):
                return heard[1]
            if ended is not None:
                raise RuntimeError(f"the {name} has ended with {ended}; the end of its log:\n{log[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {name} is not ready after {READY_SECONDS:.0f} s; its log:\n{log[-2000:]}")
            time.sleep(POLL_SECONDS)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A Spark standalone cluster on this machine.")
    parser.add_argument("--workers", type=int, default=2, help="how many (2)")
    parser.add_argument("--cores", type=int, default=1, help="of each worker (1)")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of each worker (1024)")
    parser.add_argument("--directory", type=Path, help="where to keep logs; without it they are deleted in the end")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run this Python program with its arguments on the cluster, then stop; must come last",
    )
    given = parser.parse_args()
    if given.run == []:
        parser.error("--run needs a program")
    return given


def terminated(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leave by an exception, so that the cluster is stopped on the way out."""
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Start a cluster and keep it as long as it is wanted."""
    given = arguments()
    signal.signal(signal.SIGTERM, terminated)
    with Cluster(given.workers, cores=given.cores, memory_mib=given.memory, directory=given.directory) as cluster:
        if given.run:
            environment = {**os.environ, "SPARK_MASTER": cluster.url}
            return subprocess.run([sys.executable, *given.run], env=environment, check=False).returncode  # noqa: S603
        try:
            print(cluster.url, flush=True)
            pids = ", ".join(map(str, cluster.pids))
            print(f"the master and {given.workers} workers run (processes {pids}); Ctrl-C stops them", file=sys.stderr)
            signal.pause()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
