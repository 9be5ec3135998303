# The dashboard's image: web server, worker and clock, told apart by their command. See docs/operating.md.
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
    && /opt/fp8scope/bin/pip install --no-cache-dir --constraint constraints.txt '.[dashboard]'

FROM python:3.12-slim
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
CMD ["python", "-m", "fp8scope_dashboard.servers.web", "--host", "0.0.0.0", "--port", "8000"]
