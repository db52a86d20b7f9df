"""What stores give back beside databases: small objects, most of them JSON, and files like them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Final

from libs.serving.peers.topology import Topology, decode_peer
from libs.serving.process.instance import settings_of_record
from libs.storage.objects import instance_records, queue_names, shard_owners
from services.janitor.backup import catalogue
from services.janitor.runs import history
from slatemq.textqueue import appends, holders

_NUMBER: Final = f"{1:020}.json"


def stored_object(data: bytes) -> None:
    """A small object of an instance, of the kind that the first byte chooses."""
    if data:
        _OBJECTS[data[0] % len(_OBJECTS)](data[1:])


def _peer(data: bytes) -> None:
    try:
        peer = decode_peer(data)
    except ValueError:  # what is not a peer is logged, and passed over
        return
    Topology((peer,)).advertised(peer.service)


def _run(data: bytes) -> None:
    try:
        history._decode("run", data)
    except ValueError:  # as a run
        return


def _instance(data: bytes) -> None:
    record = instance_records._decode(f"{instance_records.FOLDER}/{_NUMBER}", data)
    settings_of_record(record)


_OBJECTS: Final[tuple[Callable[[bytes], object], ...]] = (
    _peer,
    lambda data: shard_owners._decode(_NUMBER, data),
    lambda data: queue_names._decode("q", _NUMBER, data),
    _instance,
    _run,
    lambda data: catalogue._decode("record", data),
    lambda data: catalogue._decode_list("list", data),
    lambda data: catalogue._decode_list("list", gzip.compress(data, 1)),
    holders._read_slot,
    lambda data: list(appends._newest_first(data)),
    appends._intent,
)
