# The exporter and what it needs of Debian and Python, and nothing else: no package manager, no tools, no file that makes
# anybody root.  Any base will do that has Debian's layout, glibc (NVIDIA's library needs it) and Python 3.11 or newer.
ARG BASE=python:3.12-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt MANIFEST.in README.md CHANGELOG.md LICENSE ./
COPY exporter exporter
COPY deploy/docker deploy/docker
RUN python3 -m venv /opt/stallwatch \
    && /opt/stallwatch/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
        --require-hashes --requirement constraints.txt \
    && /opt/stallwatch/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps . \
    && /opt/stallwatch/bin/python -m pip uninstall --yes --disable-pip-version-check pip setuptools \
    && /opt/stallwatch/bin/python deploy/docker/collect.py /image

FROM scratch
ARG VERSION=1.0.0-rc1
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stallwatch" \
      org.opencontainers.image.description="Prometheus exporter that finds silent stalls of LLM inference servers" \
      org.opencontainers.image.source="https://github.com/stallwatch/stallwatch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /image /
ENV PATH=/opt/stallwatch/bin:/usr/local/bin:/usr/bin:/bin
# Of NVIDIA's driver only what tells of the cards, where its container runtime is used.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility
USER 65532:65532
EXPOSE 10077
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
    CMD ["/opt/stallwatch/bin/python", "-I", "/opt/stallwatch/lib/healthy.py"]
ENTRYPOINT ["/opt/stallwatch/bin/enter"]
CMD ["serve"]
