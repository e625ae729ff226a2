"""Of the image's build: a start of the endpoint compiles its loops and leaves them in NUMBA_CACHE_DIR."""

import subprocess
import sys

command = [sys.executable, "-m", "serving.server", "--bundle", sys.argv[1]]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    assert server.stdout is not None
    line = server.stdout.readline()
    sys.stderr.write(line)
    server.kill()  # nothing is in flight, and the loops are on the disk
sys.exit('"ready"' not in line)
