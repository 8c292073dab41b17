# Proxima in a container. What it writes lies in /data, so give it a folder there.
#
#   docker build --target cpu --tag proxima --build-arg TORCH_INDEX=URL .    (URL: the index of torch's wheels for CPUs)
#   docker run --rm -it --volume "$PWD:/data" proxima demo
#
#   docker build --target gpu --tag proxima:gpu .
#   docker run --rm -it --gpus all --volume "$PWD:/data" proxima:gpu train --help
#
# Pages (`label`, `studio`) listen at 127.0.0.1: add `--network host`. The user in the container has the number 1000.
FROM python:3.13-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HF_HOME=/data/.huggingface
RUN useradd --create-home --uid 1000 proxima && install --directory --owner proxima /data
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src

FROM base AS cpu
# without an index for CPUs pip takes the wheel with CUDA, which works too and is larger
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint constraints.txt . && rm -rf /build
USER 1000
WORKDIR /data
ENTRYPOINT ["proxima"]
CMD ["--help"]

# torch's wheel brings CUDA; the machine needs NVIDIA's driver and container toolkit. Triton compiles with gcc at run time.
FROM base AS gpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint constraints.txt . && rm -rf /build
USER 1000
WORKDIR /data
ENTRYPOINT ["proxima"]
CMD ["--help"]
