"""Start an image's program as a pod would, for a test of the image.

    python -m tests.infra.container ROOT CONFIG BUNDLE    the endpoint: ask it once
    python -m tests.infra.container ROOT CONFIG           a step: wait for its end

Needs root. In namespaces of its own: the root is read-only, `/tmp` is in memory, there is no network but
loopback. The program has the image's user and no capabilities. Prints a line of JSON for the test.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ASKED = {"basket": ["1000010"], "user_id": "u1", "k": 5, "at": "2017-12-05T18:30:00Z"}
URL = "http://127.0.0.1:8080/v1/recommendations"
TIMEOUT_S = 300.0
UP = 0x1  # of Linux's interface flags
SET_FLAGS = 0x8914  # SIOCSIFFLAGS


def mount(*words: str | Path) -> None:
    """Call mount(8)."""
    subprocess.run(["mount", *map(str, words)], check=True)


def prepare(root: Path, bundle: Path | None) -> None:
    """Make a pod's file system of an image's root: read-only but for `/tmp`, with the endpoint's bundle."""
    mount("--make-rprivate", "/")
    mount("--bind", root, root)
    mount("-t", "tmpfs", "tmpfs", root / "mnt")
    (root / "mnt" / "models").mkdir()
    mount("--bind", bundle or root / "mnt" / "models", root / "mnt" / "models")
    mount("-t", "tmpfs", "-o", "mode=1777,size=256m", "tmpfs", root / "tmp")
    mount("--rbind", "/dev", root / "dev")
    mount("-t", "proc", "proc", root / "proc")
    for place in (root, root / "mnt", root / "mnt" / "models"):
        mount("-o", "remount,bind,ro", place)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        fcntl.ioctl(own, SET_FLAGS, struct.pack("16sh", b"lo", UP))


def command(root: Path, config: dict[str, Any]) -> list[str]:
    """Return the image's program in its root, with its user, folder and environment."""
    user, group = config["User"].split(":")
    return [
        *("chroot", str(root), "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"),
        *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
        *("env", "-i", f"--chdir={config['WorkingDir']}", *config["Env"]),
        *(*config["Entrypoint"], *config["Cmd"]),
    ]


def write_to(folder: Path) -> str:
    """Return the name of the error of a write; empty: it was possible."""
    try:
        (folder / "probe").write_bytes(b"")
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def ask() -> dict[str, Any] | None:
    """Return the answer to a request, or None while nothing listens."""
    body = json.dumps(ASKED).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found
    except ConnectionRefusedError:
        return None
    except OSError as error:
        if isinstance(getattr(error, "reason", None), ConnectionRefusedError):
            return None
        raise


def run_step(root: Path, config: dict[str, Any]) -> None:
    """Run the program to its end, and print its exit code and the files that it wrote."""
    prepare(root, None)
    refused, written = write_to(root / "opt"), root / "tmp" / "out"
    done = subprocess.run(command(root, config), stdout=sys.stderr, check=False, timeout=TIMEOUT_S)
    files = [file for file in written.rglob("*") if file.is_file()]
    seen = {"code": done.returncode, "files": sorted(str(file.relative_to(written)) for file in files)}
    owners = sorted({file.stat().st_uid for file in files})
    print(json.dumps({**seen, "owners": owners, "write_to_root": refused}))  # noqa: T201


def main(root: Path, config: dict[str, Any], bundle: Path) -> None:
    """Start the program, wait for its first answer, and print it with the program's rights."""
    prepare(root, bundle)
    refused = write_to(root / "opt")
    began = time.monotonic()
    program = subprocess.Popen(command(root, config), stdout=sys.stderr)
    try:
        while (answer := ask()) is None:
            if program.poll() is not None or time.monotonic() > began + TIMEOUT_S:
                sys.exit(f"no answer; the program's exit code is {program.poll()}")
            time.sleep(0.02)
        seconds = time.monotonic() - began
        status = Path(f"/proc/{program.pid}/status").read_text(encoding="utf-8")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    uids, rights = fields["Uid"].split(), fields["CapEff"]
    seen = {"seconds": seconds, "answer": answer, "uids": uids, "capabilities": rights}
    print(json.dumps({**seen, "write_to_root": refused}))  # noqa: T201


if __name__ == "__main__":
    assert os.geteuid() == 0
    if len(sys.argv) > 3:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        run_step(Path(sys.argv[1]), json.loads(sys.argv[2]))
