# Proxima in a container. What it writes lies in /work, so give it a folder there.
#
#   docker build --target cpu --tag proxima .
#   docker run --rm -it --volume "$PWD:/work" proxima demo
#
#   docker build --target gpu --tag proxima:gpu .
#   docker run --rm -it --gpus all --volume "$PWD:/work" proxima:gpu train --help
#
# Pages (`label`, `studio`) listen at 127.0.0.1: add `--network host`. The user in the container has the number 1000.
FROM python:3.13-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HF_HOME=/work/.huggingface
RUN useradd --create-home --uid 1000 proxima && install --directory --owner proxima /work
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src

FROM base AS cpu
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt . && rm -rf /build
USER 1000
WORKDIR /work
ENTRYPOINT ["proxima"]
CMD ["--help"]

# torch's wheel brings CUDA; the machine needs NVIDIA's driver and container toolkit. Triton compiles with gcc at run time.
FROM base AS gpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint constraints.txt . && rm -rf /build
USER 1000
WORKDIR /work
ENTRYPOINT ["proxima"]
CMD ["--help"]
