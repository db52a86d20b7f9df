"""Calls of services that this process does not have: which process has them, and where it is."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from slatemq.errors import Unimplemented

log = logging.getLogger(__name__)

PACKAGE: Final = "slatemq.v1."

SERVED_BY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "AccessService": ("ingest", "router", "broker", "janitor"),
        "ArchivedService": ("broker",),
        "ArrivalService": ("broker",),
        "AssignmentService": ("broker",),
        "ConsumerService": ("broker",),
        "DeadLetterService": ("broker",),
        "DelayedService": ("broker",),
        "EntryService": ("broker",),
        "EventsService": ("ingest", "broker", "janitor"),
        "IngestService": ("ingest",),
        "InstanceService": ("ingest", "router", "broker", "janitor"),
        "JanitorService": ("janitor",),
        "MoveService": ("broker",),
        "OutboxService": ("broker",),
        "PurgeService": ("ingest",),
        "QueueNameService": ("broker",),
        "QueueService": ("broker",),
        "RemovalService": ("broker",),
        "RouterService": ("router",),
        "ShardService": ("ingest", "broker"),
        "SnapshotService": ("ingest", "broker"),
        "TaskService": ("ingest",),
        "TopologyService": ("ingest", "router", "broker", "janitor"),
    }
)
"""The processes that have each service, by its name in `slatemq.v1`."""

WITH_EVENTS: Final = SERVED_BY["EventsService"]
"""The processes whose callers' acts are events: what changes the instance is served there alone."""

ADDRESSES_MAX: Final = 8
"""Addresses that an error names: it has room for 256 bytes of them."""


class Elsewhere:
    """Says why a method is not served here, and where it is."""

    def __init__(
        self, directory: TopologyDirectory | None = None, own: Collection[str] = ()
    ) -> None:
        """`own` are the services of this process."""
        self._directory = directory
        self._own = own

    def is_ours(self, method: str) -> bool:
        return _service_of(method) in self._own

    async def refusal(self, method: str, *, shows_addresses: bool) -> Unimplemented:
        """The error for a call of a method (`/slatemq.v1.QueueService/GetQueue`) not served here.

        Its reason is WRONG_SERVICE where another process serves it, and UNIMPLEMENTED where none
        does. A caller that has not proven anything is not shown the addresses.
        """
        service = _service_of(method)
        kinds = SERVED_BY.get(service.removeprefix(PACKAGE), ())
        if not service.startswith(PACKAGE) or not kinds or service in self._own:
            return Unimplemented(f"{method[:200]} is not a method of any SlateMQ service")
        return await wrong_service(service, kinds, self._directory if shows_addresses else None)


async def wrong_service(
    name: str, kinds: tuple[str, ...], directory: TopologyDirectory | None
) -> Unimplemented:
    """The error for a call of a service, or of one method, that only these processes have.

    Addresses come from the directory; None shows none.
    """
    addresses = [] if directory is None else await _addresses(directory, kinds)
    where = f", at {', '.join(addresses)}" if addresses else ""
    return Unimplemented(
        f"{name} is not served here: call {'an' if kinds[0][0] in 'aeiou' else 'a'} "
        f"{' or '.join(kinds)}{where}",
        reason="WRONG_SERVICE",
        metadata={
            "service": name,
            "served_by": ",".join(kinds),
            "addresses": ",".join(addresses),
        },
    )


async def _addresses(directory: TopologyDirectory, kinds: tuple[str, ...]) -> list[str]:
    """Addresses for clients; none while the topology cannot be read."""
    try:
        topology = await directory.read()
    except StorageError as error:
        log.warning("no addresses for a caller of the wrong service: %s", error)
        return []
    found = [address for kind in kinds for address in topology.advertised(kind).values()]
    return found[:ADDRESSES_MAX]


def _service_of(method: str) -> str:
    return method.strip("/").rpartition("/")[0]
