# Every step of the pipelines: training, registry and drift, from a lock of its own.
#   make image IMAGE=pipeline
# In production give the base by digest: --build-arg BASE=docker.io/library/python@sha256:...
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE}
# An index or a folder of wheels, if not pip's default; PyTorch's index of CPU wheels, for example.
ARG PIP_ARGS=""
LABEL org.opencontainers.image.title="checkout-pipeline" org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
COPY requirements requirements
COPY pyproject.toml README.md LICENSE ./
# torch alone has no hash: see requirements/torch.txt
# shellcheck disable=SC2086 # several words
RUN python3 -m venv /opt/reco \
    && /opt/reco/bin/python -m pip install -q --no-cache-dir --require-hashes --no-deps ${PIP_ARGS} \
        -r requirements/pipeline.lock \
    && /opt/reco/bin/python -m pip install -q --no-cache-dir ${PIP_ARGS} -r requirements/torch.txt
COPY feature_repo feature_repo
COPY serving serving
COPY components components
COPY monitoring monitoring
COPY pipelines pipelines
RUN /opt/reco/bin/python -m pip install -q --no-cache-dir --no-deps --no-build-isolation . && rm -rf /src/*
# The compiled loops of a step, MLflow's and Matplotlib's files: a pod has /tmp to write to.
ENV PATH=/opt/reco/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    NUMBA_CACHE_DIR=/tmp/kernels \
    MPLCONFIGDIR=/tmp/matplotlib \
    HOME=/tmp
USER 10001:10001
WORKDIR /tmp
