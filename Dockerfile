# One image per service: docker build --build-arg SERVICE=broker .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS packages
ARG SERVICE
COPY requirements/${SERVICE}.txt /tmp/requirements.txt
# A virtual environment, because the system's own Python may not be installed into; pip itself stays
# behind: nothing that runs needs it.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes \
      -r /tmp/requirements.txt \
 && /opt/venv/bin/pip uninstall -q -y setuptools pip

FROM ${BASE}
ARG SERVICE
RUN useradd --uid 1000 --no-create-home --shell /usr/sbin/nologin slatemq \
 && mkdir /data /access && chown slatemq:slatemq /data /access && chmod 700 /data /access
COPY --from=packages /opt/venv /opt/venv
COPY slatemq /app/slatemq
COPY libs /app/libs
COPY services/__init__.py /app/services/
COPY services/${SERVICE} /app/services/${SERVICE}
WORKDIR /app
ENV SERVICE=${SERVICE} \
    PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SLATEMQ_ROOT=file:///data \
    SLATEMQ_HOST=0.0.0.0
RUN python -m compileall -q /app
USER 1000
# For clients, and for the other services.
EXPOSE 7420 7419
# What a new volume mounted here is made from: it takes over the owner.
VOLUME /data
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-S", "-E", "libs/serving/process/healthprobe.py", "127.0.0.1:7420"]
# exec: the service itself gets SIGTERM, and drains. The port is no variable, since Kubernetes sets
# SLATEMQ_PORT to tcp://… where a Service is called slatemq.
CMD ["sh", "-c", "exec python -m services.$SERVICE --port 7420 --peer-port 7419"]
