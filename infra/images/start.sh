#!/bin/sh
# numba reads compiled loops only from a folder that it may write to, and the image is read-only.
# The pod's /tmp outlives a container: a folder that a start before this one left, whole or not, is overwritten.
set -e
cp -rT /opt/reco/kernels "$NUMBA_CACHE_DIR"
exec python -P -m serving.server "$@"
