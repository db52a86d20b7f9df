"""The root command, and the way every command ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from slatemq import __version__
from slatemq.cli import interrupts
from slatemq.cli.failures import (
    EXIT_DONE,
    EXIT_REFUSED,
    EXIT_SIGNALLED,
    EXIT_USAGE,
    BadInput,
    Interrupted,
    ReaderGone,
    error_fields,
    exit_code,
    sentence,
)
from slatemq.cli.groups import Group, Place
from slatemq.cli.output import note
from slatemq.cli.session import Session, session_options
from slatemq.errors import SlateMQError
from slatemq.variables import unknown_variables

EPILOG = """\
\b
A first round, with a local stack running (`make up`):
  slatemq queue create greetings
  slatemq publish --to greetings 'hello, world'
  slatemq claim greetings
  slatemq ack LEASE            the lease that claim printed
  slatemq status

\b
Whole files, and programs as consumers:
  slatemq queue create eu --filter 'headers["region"] == "eu"'
  slatemq publish --jsonl events.jsonl --headers-from /type,/region
  slatemq consume eu --exec ./work.sh --concurrency 4

\b
Repair:
  slatemq message ls orders --state delayed
  slatemq failed ls orders
  slatemq failed redrive orders

\b
Durations are written 500ms, 30s, 2h, 7d, 1h30m. Results go to stdout, all
else to stderr; --json, before or after the command, makes results JSON, one
object per line, with IDs as text. `slatemq COMMAND --help` has examples.

\b
Exit codes: 0 done, 1 refused by the server, 2 wrong usage or input,
3 unreachable, 130 after Ctrl-C, 143 after SIGTERM, 141 when whatever read the
output ended first.
"""


class _Root(Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Click would end with 1, which is what a refusal ends with.
            raise ReaderGone from None


COMMANDS = {
    "queue": Place(
        "slatemq.cli.queue.queues", "queue", "Create, list, change, pause, purge and delete queues."
    ),
    "publish": Place(
        "slatemq.cli.publish.publishing",
        "publish",
        "Publish a message: TEXT, a file, or stdin (-); or each line of a file with --jsonl.",
    ),
    "claim": Place(
        "slatemq.cli.consume.claiming",
        "claim",
        "Claim messages of QUEUE, the most urgent first, and print them with their leases.",
    ),
    "ack": Place(
        "slatemq.cli.consume.claiming",
        "ack",
        "Say that claimed messages are processed: they are done, for good.",
    ),
    "nack": Place(
        "slatemq.cli.consume.claiming",
        "nack",
        "Give claimed messages back: they come again, or fail when no attempts are left.",
    ),
    "extend": Place(
        "slatemq.cli.consume.claiming",
        "extend",
        "Keep claimed messages longer: their leases end so much after now.",
    ),
    "consume": Place(
        "slatemq.cli.consume.consuming",
        "consume",
        "Take messages of QUEUE as they come, and ack them when they are worked on.",
    ),
    "message": Place(
        "slatemq.cli.repair.messages",
        "message",
        "Look at messages in their queues without consuming them, and repair.",
    ),
    "done": Place("slatemq.cli.repair.messages", "done", "Look at the messages that are done."),
    "failed": Place(
        "slatemq.cli.repair.dead_letters",
        "failed",
        "Look at dead letters, mend them, move them back, or throw them away.",
    ),
    "export": Place(
        "slatemq.cli.files.exporting",
        "export",
        "Write the messages of QUEUE that are in one state into a queue file.",
    ),
    "import": Place(
        "slatemq.cli.files.importing",
        "import_",
        "Import the queued messages of FILE (- reads stdin) into a queue, or publish them.",
    ),
    "events": Place(
        "slatemq.cli.publish.events",
        "events",
        "Import events of S3 stores, and see how far SlateMQ's own are published.",
    ),
    "outbox": Place(
        "slatemq.cli.repair.outbox",
        "outbox",
        "See which pushes have not arrived, and retry or discard those refused.",
    ),
    "task": Place(
        "slatemq.cli.publish.tasks",
        "task",
        "See what became of publishes accepted as tasks, and retry those that failed.",
    ),
    "janitor": Place(
        "slatemq.cli.janitor", "janitor", "Run the jobs that clean up, archive and report."
    ),
    "instance": Place(
        "slatemq.cli.instance",
        "instance",
        "See and change the settings that all processes of the instance have alike.",
    ),
    "explain": Place(
        "slatemq.cli.queue.inspecting",
        "explain",
        "Tell which queues a message with these headers would reach, and why.",
    ),
    "status": Place(
        "slatemq.cli.queue.inspecting",
        "status",
        "Show every service and shard, how far routing lags, and how deep the queues are.",
    ),
    "tq": Place(
        "slatemq.cli.tq.commands", "tq", "Work with queue files (TextQueue), without a server."
    ),
}


@click.group(
    cls=_Root,
    places=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
    no_args_is_help=True,
)
@click.version_option(__version__, prog_name="slatemq")
@session_options
def slatemq() -> None:
    """Work with SlateMQ: durable queues on an object store."""


def main() -> int:
    """Runs the command line of this process; gives the exit code."""
    _open_closed_streams()
    logging.basicConfig(level=logging.WARNING, format="slatemq: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = interrupts.EXIT_INTERRUPTED
    with suppress(KeyboardInterrupt):
        interrupts.raised()
        code = invoke(sys.argv[1:])
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
    # What is left is the interpreter's own end, which would report of a Ctrl-C at length.
    interrupts.end_with(code)
    return code


def _open_closed_streams() -> None:
    """What a shell has closed (`<&-`) is empty, or goes nowhere; no file is to take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def invoke(arguments: Sequence[str]) -> int:
    """Runs one command line; gives the exit code. What went wrong is on stderr."""
    session = Session()
    if unknown := unknown_variables(os.environ):
        note(f"warning: {unknown}")
    try:
        code = _run(arguments, session)
    finally:
        try:
            for report in session.at_end:
                report()
            sys.stdout.flush()
        except (ReaderGone, BrokenPipeError):
            _silence()
    return code


def _run(arguments: Sequence[str], session: Session) -> int:
    try:
        slatemq.main(list(arguments), prog_name="slatemq", obj=session, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_REFUSED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        error.show()
        return EXIT_USAGE
    except BadInput as error:
        note(str(error))
        return EXIT_USAGE
    except click.Abort as error:
        # Who says no is told; what Ctrl-C ends may have done a part.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            note("nothing was done")
        return EXIT_SIGNALLED + signal.SIGINT
    except Interrupted as error:
        return EXIT_SIGNALLED + error.number
    except KeyboardInterrupt:
        return EXIT_SIGNALLED + signal.SIGINT
    except SlateMQError as error:
        _report(error, session.json)
        return exit_code(error)
    except (ReaderGone, BrokenPipeError):
        _silence()
        return EXIT_SIGNALLED + signal.SIGPIPE
    except OSError as error:
        note(f"{error.filename or 'input or output'}: {error.strerror or error}")
        return EXIT_USAGE
    return EXIT_DONE


def _report(error: SlateMQError, as_json: bool) -> None:
    with suppress(BrokenPipeError):
        if as_json:
            print(json.dumps({"error": error_fields(error)}), file=sys.stderr)
        else:
            note(sentence(error))


def _silence() -> None:
    """Whoever read the output is gone: what is left in buffers must not fail again at the exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
