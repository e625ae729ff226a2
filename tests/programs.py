"""Python programs as child processes, on the project or on a copy of its packages, and their connections."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# `htons(53)`: a resolver on this machine asks others on our behalf
NAME_SERVICE = re.compile(r"(?:sin|sin6)_port=htons\(53\)")
# `inet_addr("10.0.0.1")` of IPv4, `inet_pton(AF_INET6, "::1", ...)` of IPv6
ADDRESS = re.compile(r'inet_(?:addr\(|pton\(AF_INET6, )"(?:::ffff:)?([^"]+)"')


def unguarded() -> dict[str, str]:
    """The environment without the guard of connections, which PYTHONPATH gives to each Python."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def watched(log: Path) -> list[str]:
    """The words before a command that write its connections and datagrams to a log."""
    calls = "trace=connect,sendto,sendmsg,sendmmsg"
    return ["strace", "-f", "--seccomp-bpf", "-qq", "-e", calls, "-o", str(log)]


def outside(log: Path) -> list[str]:
    """The calls in a log that name another machine, or a resolver, on whichever machine."""
    return [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if (found := ADDRESS.search(line))
        and (NAME_SERVICE.search(line) or not found[1].startswith(("127.", "::1", "0.0.0.0")))
    ]


def copy_packages(place: Path, *packages: str) -> None:
    """Copy packages, with their compiled loops, to a place where a test may change them."""
    for package in packages:
        shutil.copytree(ROOT / package, place / package)


def environment(root: Path = ROOT) -> dict[str, str]:
    """The environment of a Python on the packages under `root`, which the guard of connections watches."""
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ['PYTHONPATH']}"}


def run_python(
    *arguments: str | Path, root: Path = ROOT, timeout_s: float = 900, before: Sequence[str] = ()
) -> str:
    """Run Python on the packages under `root`, which must end well, and return its output."""
    done = subprocess.run(
        [*before, sys.executable, *arguments],
        cwd=root,
        env=environment(root),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{arguments[-3:]}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    return done.stdout
