"""Of the image's build: a start of the endpoint compiles its loops and leaves them in NUMBA_CACHE_DIR."""

import subprocess
import sys

command = [sys.executable, "-P", "-m", "serving.server", "--bundle", sys.argv[1]]
ready = False
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    assert server.stderr is not None
    for line in server.stderr:
        sys.stderr.write(line)
        if ready := '"ready"' in line:
            break
    server.kill()  # nothing is in flight, and the loops are on the disk
sys.exit(not ready)
