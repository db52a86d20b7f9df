"""`slatemq shard`: list, add, drain and remove shards, and move queues between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from slatemq._admin.rates import lags_of
from slatemq._counts import counted
from slatemq.cli.output import note, progress, say, write_json, write_table
from slatemq.cli.parameters import QUEUE, Number, confirm, flag, yes_option
from slatemq.cli.session import Group, Session
from slatemq.errors import INCOMPLETE, SHARDS, SlateMQError, Unavailable

if TYPE_CHECKING:
    from slatemq._admin.queue_models import Queue
    from slatemq._admin.shards import QueueMove, Shard, ShardKind
    from slatemq.client import Client

_NUMBER = Number(0, 16_383)
_SHARD = click.argument("number", metavar="SHARD", type=_NUMBER)

_MOVES_AT_ONCE = 4
"""As many as a broker carries out at the same time: the others would be without service."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard as it is listed; what is not known, or not of its kind, is None."""

    service: str
    shard: int
    state: str
    queues_count: int | None
    messages_count: int | None
    database_bytes: int | None
    lag: int | None
    address: str
    version: str
    note: str


@click.group("shard", cls=Group)
def shard() -> None:
    """List, add, drain and remove shards; move queues between them."""


@shard.command("ls")
def ls(session: Session) -> None:
    """List all ingest and broker shards.

    Examples:
      slatemq shard ls
      slatemq shard ls --json | jq 'select(.state == "draining") | .note'

    The state is serving, draining (a broker takes no new queues, an ingest no
    publishes), drained (it is empty, and can be removed), or down. Messages are
    those in all lists of a broker's queues; bytes are those of the database. Lag
    is the number of stored messages that are not yet routed: for an ingest, to all
    brokers; for a broker, from all ingests; unknown (null) where an ingest or the
    routers are down. The caller needs the verb operate.
    """
    listed, removed = session.call(_listed)
    if session.json:
        for one in listed:
            write_json(asdict(one))
        return
    heads = ("shard", "state", "queues", "messages", "bytes", "lag", "version", "address")
    write_table(heads, map(_row, listed))
    for one in listed:
        if one.note:
            note(f"{one.service} {one.shard}: {one.note}")
    for service, numbers in removed.items():
        if numbers:
            text = f"removed {service} shards, whose numbers are not used again"
            note(f"{text}: {', '.join(map(str, numbers))}")


async def _listed(client: Client) -> tuple[list[_Shard], dict[str, Sequence[int]]]:
    ingests, brokers, status, examined = await asyncio.gather(
        client.shards("ingest"),
        client.shards("broker"),
        client.status(settings=False, queues=False),
        client.examine(),
    )
    addresses = {(one.service, one.shard): one.address for one in status.services}
    versions = {one.asked: one.version for one in examined}
    lags = lags_of(status)
    listed = []
    for one in (*ingests.shards, *brokers.shards):
        name = (one.service, one.shard)
        listed.append(
            _Shard(
                *name,
                one.state,
                one.queues_count,
                one.messages_count,
                None if one.problem else one.database_bytes,
                lags.get(name),
                addresses.get(name, ""),
                versions.get(name, ""),
                one.problem or _left(one),
            )
        )
    return listed, {"ingest": ingests.removed, "broker": brokers.removed}


def _left(found: Shard) -> str:
    """What a shard that is being drained still has."""
    return ", ".join(found.remaining) if found.state == "draining" else ""


def _row(one: _Shard) -> tuple[object, ...]:
    counts = (one.queues_count, one.messages_count, one.database_bytes)
    shown = ("" if count is None else count for count in counts)
    lag = "unknown" if one.lag is None else one.lag
    return (f"{one.service} {one.shard}", one.state, *shown, lag, one.version, one.address)


@shard.command("add")
def add(session: Session) -> None:
    """Say how to add a shard: start a process with the next number.

    Example:
      slatemq shard add

    Nothing else is needed: a shard exists once its process has started, and new
    queues, or publishes, go to it. The numbers of removed shards are not used
    again.
    """
    numbers = session.call(_next_numbers)
    if session.json:
        write_json({f"next_{service}_shard": number for service, number in numbers.items()})
        return
    say("start a process on the root of the instance, with the next number:")
    for service, number in numbers.items():
        say(f"  python -m services.{service} --shard {number} --root ...")


async def _next_numbers(client: Client) -> dict[str, int]:
    """Of each kind of shard, the number after all that are, or were removed."""
    kinds = {"ingest": await client.shards("ingest"), "broker": await client.shards("broker")}
    return {
        service: max([*(one.shard for one in found.shards), *found.removed], default=-1) + 1
        for service, found in kinds.items()
    }


@shard.command("drain")
@_SHARD
@flag("--ingest", help="Drain the ingest shard SHARD: it takes no more publishes.")
@flag("--cancel", help="End the drain: the shard takes new queues, or publishes, again.")
@flag("--move", help="Move its queues to other shards, and wait until they are there.")
def drain(session: Session, number: int, ingest: bool, cancel: bool, move: bool) -> None:
    """Have the broker shard SHARD take no new queues, so that it can be removed once it has none.

    With --ingest, have the ingest shard SHARD take no publishes; clients send them to others.

    Examples:
      slatemq shard drain 2
      slatemq shard drain 2 --move
      slatemq shard drain 2 --cancel
      slatemq shard drain 1 --ingest

    Its queues are served as before, until they are deleted or moved. Repeat the
    command to see what is left. With --move, each queue goes to a shard with
    little to do, and waits meanwhile, as with `slatemq shard move`; a partition
    goes to a shard without any of its queue. After Ctrl-C the moves that have
    begun go on.
    """
    if cancel and move:
        raise click.UsageError("--cancel contradicts --move: leave one out")
    if ingest and move:
        raise click.UsageError("--move moves queues, which an ingest does not have: leave it out")
    failed: SlateMQError | None = None
    if move:
        failed = session.call(lambda client: _emptied(session, client, number))
    service = _service_of(ingest)
    found = session.call(lambda client: client.drain_shard(service, number, cancel=cancel))
    if cancel:
        what = "publishes" if ingest else "new queues"
        text = f"{service} shard {number} takes {what} again"
    else:
        text = _drained(found)
    session.show(_fields(found), text)
    if failed is not None:
        raise failed


def _service_of(ingest: bool) -> ShardKind:
    return "ingest" if ingest else "broker"


def _fields(found: Shard) -> dict[str, object]:
    """A shard for programs: its number by its kind, and what its kind has."""
    fields = {name: value for name, value in asdict(found).items() if value is not None}
    return {f"{fields.pop('service')}_shard": fields.pop("shard"), **fields}


def _drained(found: Shard) -> str:
    """How far the drain of a shard is."""
    name = f"{found.service} shard {found.shard}"
    if found.remaining:
        return f"{name} is draining; it has {', '.join(found.remaining)}"
    command = f"slatemq shard remove {found.shard}{' --ingest' * (found.service == 'ingest')}"
    return f"{name} is drained: `{command}` removes it"


@shard.command("move")
@click.argument("queues", metavar="QUEUE...", type=QUEUE, nargs=-1, required=True)
@click.option(
    "--to",
    "target",
    metavar="SHARD",
    type=_NUMBER,
    help="The broker shard.  [default: one with little to do]",
)
@click.option(
    "--partition",
    metavar="INDEX",
    type=Number(0),
    help="The partition that moves, of queues that have several.",
)
def move(
    session: Session, queues: Sequence[str], target: int | None, partition: int | None
) -> None:
    """Move queues to another broker shard, with all that they have.

    Examples:
      slatemq shard move orders --to 2
      slatemq shard move orders refunds --to 2 --json
      slatemq shard move clicks --partition 2 --to 5

    A shard has at most one partition of a queue, so the other shard must have none
    of it.

    While a queue moves, publishes are stored as ever, and all other calls about it
    wait, mostly for less than a second. Leases end: their messages are delivered
    again, and the attempt is not counted. Nothing is lost or doubled, whichever
    process is killed meanwhile. After Ctrl-C the moves that have begun go on;
    repeat the command to wait for them. The caller needs the verb operate.
    """
    places = [(queue_id, partition) for queue_id in dict.fromkeys(queues)]
    is_one = len(places) == 1
    failed = session.call(
        lambda client: _move_all(session, client, places, target, names_last=not is_one)
    )
    if failed is not None:
        raise failed


async def _emptied(session: Session, client: Client, number: int) -> SlateMQError | None:
    await client.drain_shard("broker", number)
    places: list[tuple[str, int | None]] = []
    try:
        async for queue in client.list_queues():
            places += _places_on(number, queue)
    except Unavailable as error:
        if error.reason != INCOMPLETE or number in map(int, error.metadata[SHARDS].split(",")):
            raise
        note(f"{error.message}; moving the other queues off shard {number}")
    return await _move_all(session, client, places, None, names_last=True)


def _places_on(number: int, queue: Queue) -> Iterable[tuple[str, int | None]]:
    """What a shard has of a queue and is not leaving it: all of it, or some partition."""
    is_whole = not queue.partitions_count
    if is_whole and queue.broker_shard == number and queue.moving_to_broker_shard is None:
        yield queue.queue_id, None
    for index, one in queue.partitions.items():
        if one.broker_shard == number and one.moving_to_broker_shard is None:
            yield queue.queue_id, index


async def _move_all(
    session: Session,
    client: Client,
    places: Sequence[tuple[str, int | None]],
    target: int | None,
    *,
    names_last: bool,
) -> SlateMQError | None:
    """Moves queues, or the partitions named; prints where each is, and why others stay.

    Returns the last error; with `names_last` it begins with what stays, as the others do.
    """
    turns = asyncio.Semaphore(_MOVES_AT_ONCE)
    failed: list[tuple[str, SlateMQError]] = []
    with progress(not session.json, "move", len(places)) as update:

        def report(at: QueueMove) -> None:
            name = _named(at.queue_id, at.partition)
            update(description=f"{name}: {counted(at.copied_rows_count, 'row')}")

        async def move_one(queue_id: str, partition: int | None) -> None:
            async with turns:
                try:
                    shard = await client.move_queue(
                        queue_id, target, partition=partition, on_progress=report
                    )
                except SlateMQError as error:
                    failed.append((_named(queue_id, partition), error))
                    return
                finally:
                    update(advance=1)
            fields: dict[str, object] = {"queue_id": queue_id, "broker_shard": shard}
            if partition is not None:
                fields["partition"] = partition
            text = f"{_named(queue_id, partition)} is on broker shard {shard}"
            session.show(fields, text)

        await asyncio.gather(*(move_one(*place) for place in places))
    if not failed:
        return None
    *others, (name, last) = failed
    for other, error in others:
        note(f"{other}: {error.message}")
    if names_last:
        last.message = f"{name}: {last.message}"
    return last


def _named(queue_id: str, partition: int | None) -> str:
    return queue_id if partition is None else f"partition {partition} of {queue_id}"


@shard.command("remove")
@_SHARD
@flag("--ingest", help="Remove the ingest shard SHARD.")
@yes_option
def remove(session: Session, number: int, ingest: bool, yes: bool) -> None:
    """Remove the drained broker shard SHARD, or with --ingest the ingest shard, permanently.

    Examples:
      slatemq shard remove 2 --yes
      slatemq shard remove 1 --ingest --yes

    Its process ends with exit code 0, and its database is deleted; stop what would
    start it again. While it has queues, messages, pushes or events, the command is
    refused, and says what is left. No process starts with the number of a removed
    shard.
    """
    service = _service_of(ingest)
    confirm(yes, f"Remove {service} shard {number} permanently?")
    session.call(lambda client: client.remove_shard(service, number))
    session.show({f"{service}_shard": number, "removed": True}, f"removed {service} shard {number}")
