# The endpoint: the runtime's lock, this project's two serving packages, and their compiled loops.
#   make image     (first it makes build/kernel-bundle, a toy bundle that the loops are compiled with)
# In production give both bases by digest: --build-arg BASE=docker.io/library/python@sha256:...
ARG BUILD=docker.io/library/python:3.11-bookworm
ARG BASE=docker.io/library/python:3.11-slim-bookworm
# Machine code for any x86-64 processor of the last ten years: numba's own choice is this machine's alone.
ARG CPU=+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2

FROM ${BUILD} AS build
# An index or a folder of wheels, if not pip's default.
ARG PIP_ARGS=""
ARG CPU
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
COPY requirements/endpoint.lock requirements/
# shellcheck disable=SC2086 # several words
RUN python3 -m venv /opt/reco \
    && /opt/reco/bin/python -m pip install -q --no-cache-dir --no-compile --require-hashes --no-deps ${PIP_ARGS} \
        -r requirements/endpoint.lock
COPY pyproject.toml README.md LICENSE ./
COPY feature_repo feature_repo
COPY serving serving
RUN /opt/reco/bin/python -m pip install -q --no-cache-dir --no-compile --no-deps --no-build-isolation .
# Taken out: installers, tests, headers, symbols, and parts of libraries that an answer never loads. The runtime's
# own libonnxruntime.so is for programs in C: Python's module holds a copy. A wheel has no links, so libarrow_python
# is in it three times; the others ask for the name with one number. KServe's package imports its client of the
# Kubernetes API: the endpoint has no use for it, nor for aiohttp, which no module imports. Other libraries do not
# survive `strip`: their wheels were patched after linking.
WORKDIR /opt/reco/lib/python3.11/site-packages
RUN rm -rf pip pip-* setuptools setuptools-* _distutils_hack distutils-precedence.pth pkg_resources grpc_tools PIL \
        pillow.libs pyarrow/include pyarrow/src pyarrow/libarrow_flight* pyarrow/_flight* \
        onnxruntime/transformers onnxruntime/quantization onnxruntime/tools onnxruntime/capi/libonnxruntime.so.* \
        pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.*.* pyarrow/_pyarrow_cpp_tests* \
        kubernetes kserve/models kserve/api aiohttp aiosignal frozenlist multidict propcache yarl \
        numba/cuda numpy/f2py numpy/_core/_simd*.so /opt/reco/bin/pip* \
    && sed -i '/^# import client apis/,$d' kserve/__init__.py \
    && find . -type d -name tests -prune -exec rm -rf {} + \
    && find . \( -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' \) -delete \
    && strip --strip-unneeded llvmlite/binding/*.so uvloop/*.so pyarrow/*.so pyarrow/lib*.so.* numba/*.so \
        numba/np/ufunc/*.so cryptography/hazmat/bindings/*.so httptools/parser/*.so pydantic_core/*.so yaml/*.so \
    && find feature_repo -name '*.py' -exec touch -d '2020-01-01' {} +
# A start with a toy bundle compiles the loops and the modules that are used, and no others. An image keeps
# whole seconds of a file's time, which numba compares: hence `touch`.
COPY build/kernel-bundle /bundle
COPY infra/images/compile_loops.py /src/
ENV NUMBA_CACHE_DIR=/opt/reco/kernels NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=${CPU} \
    RECO_CONFIG=off RECO_HOME=/tmp/home RECO_HTTP_PORT=0 RECO_GRPC_PORT=0 RECO_STORE_URL=memory: \
    RECO_LOG_DIR=/tmp/home/log ORT_DISABLE_TELEMETRY=1
RUN /opt/reco/bin/python /src/compile_loops.py /bundle && chmod -R a+rX /opt/reco/kernels

FROM ${BASE}
ARG CPU
LABEL org.opencontainers.image.title="checkout-endpoint" org.opencontainers.image.licenses="Apache-2.0"
# No installer: neither the base's own, nor the one that it could unpack.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3.*/ensurepip /usr/local/lib/python3.*/site-packages/* \
        /usr/lib/python3.*/ensurepip /usr/share/python-wheels
COPY --from=build /opt/reco /opt/reco
COPY infra/images/start.sh /opt/reco/start
ENV PATH=/opt/reco/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    NUMBA_CACHE_DIR=/tmp/kernels \
    NUMBA_CPU_NAME=x86-64-v3 \
    NUMBA_CPU_FEATURES=${CPU} \
    RECO_CONFIG=off \
    RECO_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080 8081 9090
ENTRYPOINT ["/opt/reco/start"]
CMD ["--bundle", "/mnt/models"]
