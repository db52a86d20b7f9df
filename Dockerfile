# One image for each service: docker build --build-arg SERVICE=broker .
#
# Two builds of the same commit on the same base have the same files, to the byte and the second. A
# base is named by tag, since its digest is another one in each registry: name yours by its digest
# (--build-arg BASE=…@sha256:…) where builds must agree over time.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS packages
ARG SERVICE
COPY requirements/${SERVICE}.txt /tmp/requirements.txt
# A virtual environment, because the system's own Python may not be installed into; pip itself stays
# behind: nothing that runs needs it.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check \
      --require-hashes -r /tmp/requirements.txt \
 && /opt/venv/bin/pip uninstall -q -y setuptools pip

FROM packages AS files
ARG SERVICE
# The time of all files, in seconds since the Unix epoch: by default that of files in wheels.
ARG SOURCE_DATE_EPOCH=315532800
COPY slatemq /app/app/slatemq
COPY libs /app/app/libs
COPY services/__init__.py services/container.py /app/app/services/
COPY services/${SERVICE} /app/app/services/${SERVICE}
# A folder for each layer, as the root is to have it. Compiled files state no time, and Python does
# not look whether their sources have changed. A user is a line of a file: useradd would write down
# the day. The hash seed orders the constants of sets.
RUN mkdir -p /user/etc /owned/data /owned/access /owned/console /venv/opt \
 && cp -a /opt/venv /venv/opt/ \
 && find /app /venv -name __pycache__ -prune -exec rm -r {} + \
 && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash -s /venv /venv/opt \
 && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash -s /app /app/app \
 && cp /etc/passwd /etc/group /user/etc/ \
 && echo 'slatemq:x:1000:1000::/nonexistent:/usr/sbin/nologin' >> /user/etc/passwd \
 && echo 'slatemq:x:1000:' >> /user/etc/group \
 && chmod -R u=rwX,go=rX /user /venv /app && chmod 700 /owned/* \
 && find /user /owned /venv /app -exec touch -h -d @${SOURCE_DATE_EPOCH} {} +

FROM ${BASE}
ARG SERVICE
COPY --from=files /user /
COPY --from=files --chown=1000:1000 /owned /
COPY --from=files /venv /
COPY --from=files /app /
WORKDIR /app
ENV SERVICE=${SERVICE} \
    PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SLATEMQ_ROOT=file:///data \
    SLATEMQ_HOST=0.0.0.0
USER 1000
# For clients, and for the other services.
EXPOSE 7420 7419
# What a new volume mounted here is made from: it takes over the owner.
VOLUME /data
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-S", "-E", "services/container.py", "probe"]
CMD ["python", "-m", "services.container"]
