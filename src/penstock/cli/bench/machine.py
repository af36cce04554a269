"""What a figure was measured on: enough to compare two, nothing that tells whose machine it is."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and the system; no host name, no user, no path."""

    cores: int
    memory_bytes: int
    cpu_model: str
    os_release: str

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / (1 << 30):.1f} GiB"
        return f"{self.cpu_model}, {self.cores} cores, {memory}, {self.os_release}"


def this_machine() -> Machine:
    """Describe the machine that this runs on."""
    return Machine(
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        cpu_model=_cpu_model(),
        os_release=f"{platform.system()} {platform.release()}",
    )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:  # only Linux has this file
        pass
    return platform.processor() or platform.machine()
