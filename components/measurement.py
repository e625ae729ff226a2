"""A measurement -> the machine, software and commit that it was made with."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("torch", "onnxruntime", "faiss-cpu", "numpy", "kserve", "uvicorn", "evidently", "feast")


def measured_on() -> dict[str, Any]:
    """Return the time, machine, versions and commit of a measurement made now."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
        "software": {"python": platform.python_version(), **_versions()},
        "commit": commit(),
    }


def machine_state() -> dict[str, Any]:
    """Return the time, the commit, the load average, and the seconds of all cores that other guests took."""
    steal_s = getattr(psutil.cpu_times(), "steal", 0.0)  # only Linux counts it
    return {"at": time.time(), "commit": commit(), "load_average": os.getloadavg(), "steal_s": steal_s}


def control_groups(root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of our control groups (v2), the own one first; `root` is of the file system."""
    with contextlib.suppress(OSError):  # only Linux has them
        for path in re.findall(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE):
            own = root / "sys/fs/cgroup" / path
            yield from (own, *own.parents)


def cores(root: Path = Path("/")) -> int:
    """Return how many processors this process may use: a pod may use fewer than its node has."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    allowed = [float(len(affinity(0)) if affinity else os.cpu_count() or 1)]
    for group in control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no limit: the file is absent, or holds "max"
            quota, period = map(int, (group / "cpu.max").read_text().split())
            allowed.append(quota / period)
    return max(1, math.ceil(min(allowed)))


def processor() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def commit() -> str:
    """Return the commit of this code, with a plus sign when files differ from it, or "unknown".

    Code that was installed into an environment may lie in the folder of another repository.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ours = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(ours, capture_output=True, check=True)
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    return "unknown"
