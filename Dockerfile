# The server's image: web server, workers and beat, told apart by their command. PostgreSQL and Redis are elsewhere.
# See docs/operating.md.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY build_backend build_backend
COPY agent agent
COPY kernels kernels
COPY dashboard dashboard
# A server quantises nothing.
ENV FP8SCOPE_BUILD_KERNELS=0
RUN python -m venv /opt/fp8scope \
    && /opt/fp8scope/bin/pip install --no-cache-dir --constraint constraints.txt '.[server]'

FROM python:3.12-slim
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="fp8scope" \
      org.opencontainers.image.description="Observability dashboard for FP8 training runs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/fp8scope/fp8scope" \
      org.opencontainers.image.version="$VERSION"
RUN useradd --system --uid 10001 --home-dir /data fp8scope \
    && install --directory --owner fp8scope --group fp8scope /data
COPY --from=build /opt/fp8scope /opt/fp8scope
ENV PATH=/opt/fp8scope/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    DJANGO_SETTINGS_MODULE=fp8scope_dashboard.settings.base \
    FP8SCOPE_DATA_DIR=/data
USER fp8scope
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# Of the web server. docker-compose.yml has those of the other commands.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s \
    CMD ["python", "-m", "fp8scope_dashboard.servers.health", "--port", "8000"]
CMD ["python", "-m", "fp8scope_dashboard.servers.web", "--host", "0.0.0.0", "--port", "8000"]
