"""What all commands share: where the server is, the form of the output, the event loop, groups."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

import slatemq
from slatemq.cli import interrupts
from slatemq.cli.failures import Interrupted
from slatemq.cli.output import say, write_json
from slatemq.cli.parameters import DURATION, ENDPOINT
from slatemq.errors import InvalidArgument, SlateMQError

if TYPE_CHECKING:
    from slatemq.client import Client
    from slatemq.encryption import KeyRing

T = TypeVar("T")

DEFAULT_ENDPOINT = "127.0.0.1:7420"
"""The first service of `make up` and docker-compose."""

ENDPOINT_VARIABLE = "SLATEMQ_ENDPOINT"

DEFAULT_TIMEOUT = timedelta(seconds=30)

CREDENTIALS = {
    "profile": (
        "NAME",
        "The profile of ~/.config/slatemq/profiles.toml to use.  "
        "[env var: SLATEMQ_PROFILE; default: default]",
    ),
    "tls": ("", "Connect with TLS; so do --ca, --cert and --server-name.  [env var: SLATEMQ_TLS]"),
    "ca": (
        "FILE",
        "Certificates of the authorities that sign the services' certificates, in PEM.  "
        "[env var: SLATEMQ_CA]",
    ),
    "cert": ("FILE", "The client's certificate, in PEM.  [env var: SLATEMQ_CERT]"),
    "key": ("FILE", "Its private key, in PEM.  [env var: SLATEMQ_KEY]"),
    "token_file": (
        "FILE",
        "A file with the client's token.  [env vars: SLATEMQ_TOKEN_FILE, SLATEMQ_TOKEN]",
    ),
    "server_name": (
        "NAME",
        "The name in the services' certificates, if it is not that of the address.  "
        "[env var: SLATEMQ_SERVER_NAME]",
    ),
    "encryption_keys": (
        "FILE",
        "Keys that payloads are encrypted with before they are sent, and decrypted with when they "
        "are read: lines of ID KEY, the current one first.  [env var: SLATEMQ_ENCRYPTION_KEYS]",
    ),
}
"""The options that say who calls, and how: metavar and help. Every command takes them; only the
root command lists them, since they are the same for all."""


@dataclass
class Session:
    """The options that every command takes, before or after its name.

    Attributes:
        at_end: Called after a failed command's error was printed, to print what else is to say.
        has_keys: Whether payloads are encrypted and decrypted; once there is a client.
        missing_keys: Those that a note has named: without keys, payloads stay encrypted.
    """

    endpoint: str | None = None
    json: bool = False
    timeout: timedelta = DEFAULT_TIMEOUT
    profile: str | None = None
    tls: bool | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token_file: str | None = None
    server_name: str | None = None
    encryption_keys: str | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    has_keys: bool = False
    missing_keys: set[str] = field(default_factory=set)

    def connect(self) -> Client:
        """A client of the server; entering it raises Unavailable when nothing answers there.

        Raises UsageError for credentials that cannot be used.
        """
        address = self.address
        credentials = self.credentials()
        self.has_keys = bool(credentials.encryption_keys)
        try:
            # Loads gRPC only now: that takes longer than a command that needs no server.
            return slatemq.connect(address, call_timeout=self.timeout, credentials=credentials)
        except InvalidArgument as error:
            raise _wrong_usage(error) from error

    def credentials(self) -> slatemq.Credentials:
        """The credentials of the options, the environment and the profile. Raises UsageError."""
        given = {name: getattr(self, name) for name in CREDENTIALS if name != "profile"}
        try:
            return slatemq.Credentials.load(given, profile=self.profile)
        except InvalidArgument as error:
            raise _wrong_usage(error) from error

    def key_ring(self) -> KeyRing | None:
        """The keys that payloads are encrypted with. Raises as `connect`."""
        file = self.credentials().encryption_keys
        try:
            return import_module("slatemq.encryption").KeyRing.from_file(file) if file else None
        except InvalidArgument as error:
            raise _wrong_usage(error) from error

    def call(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Run `work` with a client to its end, as `run` does."""

        async def connected() -> T:
            async with self.connect() as client:
                return await work(client)

        return run(connected())

    def show(self, fields: Mapping[str, Any], text: str) -> None:
        """Print a result: the object with --json, else the text."""
        if self.json:
            write_json(fields)
        else:
            say(text)

    @property
    def address(self) -> str:
        """Where a service answers: of the option, or the environment."""
        if self.endpoint is not None:
            return self.endpoint
        address = os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        try:
            return str(ENDPOINT.convert(address, None, None))
        except click.BadParameter as error:
            raise click.UsageError(f"{ENDPOINT_VARIABLE}: {error.message}") from error


_FIELDS: Final = {
    **{name: f"--{name.replace('_', '-')}" for name in CREDENTIALS},
    "encryption": "--encryption-keys",
    "call_timeout": "--timeout",
}
"""The options of what a client is made with."""


def _wrong_usage(error: InvalidArgument) -> click.UsageError:
    return click.UsageError(f"{_FIELDS.get(error.field, error.field)}: {error.description}")


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Put the value of an option into the session."""
    session = ctx.find_root().ensure_object(Session)
    if value is not None and param.name is not None:
        setattr(session, param.name, value)


JSON_OPTION = click.Option(
    ["--json"],
    is_flag=True,
    default=None,
    expose_value=False,
    callback=_keep,
    help="Print one JSON object per line, for programs.",
)

SESSION_OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--endpoint"],
        type=ENDPOINT,
        metavar="HOST:PORT[,…]",
        expose_value=False,
        callback=_keep,
        help="Any service of SlateMQ; of several, the first that answers.  "
        f"[env var: {ENDPOINT_VARIABLE}; default: {DEFAULT_ENDPOINT}]",
    ),
    JSON_OPTION,
    click.Option(
        ["--timeout"],
        type=DURATION,
        expose_value=False,
        callback=_keep,
        help="How long to retry while services are down; the endpoint itself for 3s at most, or "
        "6s where it accepts connections and does not answer.  [default: 30s]",
    ),
)


class _RootOption(click.Option):
    """An option that every command takes, and only the root command lists."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.parent is None else None


def _credential_option(name: str) -> click.Option:
    metavar, text = CREDENTIALS[name]
    kind: dict[str, Any] = {"metavar": metavar} if metavar else {"is_flag": True, "default": None}
    flag = "--" + name.replace("_", "-")
    return _RootOption([flag], expose_value=False, callback=_keep, help=text, **kind)


SESSION_OPTIONS += tuple(map(_credential_option, CREDENTIALS))

_pass_session = click.make_pass_decorator(Session, ensure=True)


SIMILARITY: Final = 0.7
"""How similar a word must be to one of ours that is suggested for it, from 0 to 1."""

SYNONYMS: Final[Mapping[str, Sequence[str]]] = {
    "--by": ("--lease",),
    "--error": ("--reason",),
    "--token": ("--token-file",),
    "add": ("create",),
    "delete": ("remove",),
    "get": ("show",),
    "list": ("ls",),
    "remove": ("delete",),
    "rm": ("delete", "remove"),
}
"""Options and commands that people expect, and what they may be called here."""


def _suggestion(given: str, known: Sequence[str]) -> str:
    """A question for the one of the words that was meant; empty where none is likely."""
    from difflib import get_close_matches  # It takes longer to load than most commands.

    ours = [one for one in SYNONYMS.get(given, ()) if one in known]
    meant = ours or get_close_matches(given, known, 1, SIMILARITY)
    return f" Did you mean {meant[0]!r}?" if meant else ""


class Command(click.Command):
    """A command that takes the options of the session, and whose function gets it first.

    In its help, what begins with `Example` is shown last, and as it is written.
    """

    session_options: Sequence[click.Option] = SESSION_OPTIONS

    def __init__(
        self,
        name: str | None,
        callback: Callable[..., Any],
        params: Sequence[click.Parameter],
        help: str,  # noqa: A002 - the parent's word
        epilog: str = "",
        **kwargs: Any,
    ) -> None:
        text, example, examples = cleandoc(help).partition("\n\nExample")
        super().__init__(
            name,
            callback=_pass_session(callback),
            params=[*params, *self.session_options],
            help=text,
            epilog=verbatim(f"Example{examples}" if example else epilog),
            **kwargs,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Suggests our word where an option has another name here, else the most similar one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [option for one in self.params for option in one.opts]
            text = error.message + _suggestion(error.option_name, known)
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None


class LocalCommand(Command):
    """A command that asks no server."""

    session_options = (JSON_OPTION,)


def verbatim(text: str) -> str:
    """The text with the marks by which Click keeps the lines of each paragraph."""
    return text and "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip().split("\n\n"))


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """A decorator that makes a function a command outside of any group."""
    return click.command(name, cls=Command, **attributes)


def write_listing(
    session: Session,
    items: Callable[[Client], AsyncIterator[T]],
    fields: Callable[[T], Mapping[str, Any]],
    show: Callable[[Sequence[T]], None],
) -> None:
    """Print all items: with --json the fields of each, else what `show` makes of them.

    Raises SlateMQError where the listing is not complete, after printing what came before.
    """
    found: list[T] = []

    async def collect(client: Client) -> SlateMQError | None:
        try:
            async for item in items(client):
                found.append(item)  # noqa: PERF401 - what came before an error is printed
        except SlateMQError as error:
            return error
        return None

    problem = session.call(collect)
    if problem is not None and not found:
        raise problem
    if session.json:
        for one in found:
            write_json(fields(one))
    else:
        show(found)
    if problem is not None:
        raise problem


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end. The first Ctrl-C or SIGTERM cancels it, and raises Interrupted.

    A cancelled command may still print how far it came; a second signal cuts that short.
    """
    import asyncio

    return asyncio.run(_interruptible(work))


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise


async def in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises, run in a thread that may be left behind.

    It may block indefinitely, as a read from a terminal. `asyncio.to_thread` would delay the end of
    the program until the read returns.
    """
    import asyncio
    import threading
    from concurrent.futures import Future

    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # From now on a cancelled wait leaves it alone.

    def work() -> None:
        try:
            done.set_result(function())
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(done)


class CommandEntry(NamedTuple):
    """Where a command is defined, and its line in the list of commands.

    The line repeats the command's own help, because the list is shown without loading the command.
    """

    module: str
    name: str
    summary: str


class Group(click.Group):
    """Lists its commands with the first sentence of each, in full.

    Commands in `places` are loaded when they run: loading all of them takes longer than most of
    them run.
    """

    command_class = Command

    def __init__(
        self,
        *args: Any,
        places: Mapping[str, CommandEntry] | None = None,
        epilog: str = "",
        **kwargs: Any,
    ):
        super().__init__(*args, epilog=verbatim(epilog), **kwargs)
        self.places = dict(places or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.places})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self.places.get(cmd_name)
        if place is None or cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        with interrupts.ending():
            command: click.Command = getattr(import_module(place.module), place.name)
        self.add_command(command, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggests commands that are not loaded yet, too."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            names = self.list_commands(ctx)
            text = error.message + _suggestion(error.command_name, names)
            raise click.NoSuchCommand(error.command_name, text, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._summary(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _summary(self, ctx: click.Context, name: str) -> str:
        if name in self.places:
            return self.places[name].summary
        command = self.get_command(ctx, name)
        return command.get_short_help_str(limit=500) if command is not None else ""
