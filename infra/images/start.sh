#!/bin/sh
# numba reads compiled loops only from a folder that it may write to, and the image is read-only.
set -e
cp -r /opt/reco/kernels "$NUMBA_CACHE_DIR"
exec python -m serving.server "$@"
