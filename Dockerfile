# Two images of the server; docs/deploy.md says how to run them.
#
#   docker build --target cpu -t rwkv-batch:cpu .
#   docker build --target cuda -t rwkv-batch:cuda .                                for GPUs of the list below
#   docker build --target cuda --build-arg ARCHS=90a -t rwkv-batch:cuda .          for an H100 or H200 alone
#
# The kernels are compiled in a stage of their own, so that no image that runs has the CUDA toolkit in it. Such an
# image has the kernels for the GPUs of ARCHS and cannot build others: there, a warning says so and slow torch
# operations run.

FROM scratch AS source
COPY app.py state_pool.py /
COPY rwkv_batch /rwkv_batch
COPY routes /routes
COPY demo /demo
# By these files the server finds the library that was built of them.
COPY cuda /cuda

FROM python:3.12-slim AS base
RUN useradd --uid 1000 --create-home rwkv \
    && install -d -o rwkv -g rwkv /data /models /home/rwkv/.cache /home/rwkv/.cache/rwkv-batch
WORKDIR /app
COPY requirements.txt requirements-base.txt requirements-cluster.txt requirements-traces.txt ./
# With what --state-db postgresql://... and --traces need.
RUN pip install --no-cache-dir -r requirements-base.txt -r requirements-cluster.txt -r requirements-traces.txt
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
VOLUME ["/data", "/models"]
EXPOSE 8000
# Running requests get --drain-seconds (25), then the engine stores what is left: allow 100 seconds, as
# `docker run --stop-timeout 100` does.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python", "-m", "rwkv_batch.processes.health"]
# What follows the image's name in `docker run` comes behind these flags, and wins over them.
ENTRYPOINT ["python", "app.py", "--host", "0.0.0.0", "--state-db", "/data/sessions.db", "--models", "/models"]

FROM base AS cpu
# It compiles the kernels for the processor that the container runs on. Not pinned: the base image decides which it has.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# The version is that of requirements.txt; on x86-64 PyPI has torch with CUDA only.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)"
COPY --from=source / ./
RUN python -m compileall -q .
USER 1000:1000

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS kernels
# Not pinned: that image's Ubuntu has one Python 3.12, in the newest patch only.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.txt requirements-base.txt ./
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir -r requirements-base.txt \
    && /venv/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)"
# Not all of the server, so that a change elsewhere does not compile the kernels again.
COPY cuda cuda
COPY rwkv_batch/__init__.py rwkv_batch/
COPY rwkv_batch/ops rwkv_batch/ops
# A100, RTX 30, RTX 40 and L4, H100 and H200, B200, RTX 50
ARG ARCHS="80 86 89 90a 100 120"
ENV RWKV_BATCH_CACHE=/cache
RUN for arch in $ARCHS; do /venv/bin/python -m rwkv_batch.ops.cuda.build "$arch" || exit 1; done

FROM base AS cuda
RUN pip install --no-cache-dir -r requirements.txt
COPY --from=source / ./
RUN python -m compileall -q .
# The server looks for kernels in the user's cache. The choice of a way for each GEMM is written there too.
COPY --from=kernels --chown=1000:1000 /cache/kernels /home/rwkv/.cache/rwkv-batch/kernels
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
