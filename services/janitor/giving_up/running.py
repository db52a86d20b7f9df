"""Whether the process of a shard that is to be given up still runs, as far as that can be seen.

It is looked for as a standby does: at the address of its claim, else at that of the topology. A
process that stands still, or that asks for a certificate which this one lacks, is seen by its port.
"""

from __future__ import annotations

import asyncio
from typing import Final

from libs.serving.peers.channels import open_channel
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.health import owner_health
from libs.serving.process.standby import GONE_LOOK_S, OwnerWatch, Sign, listens
from libs.storage.database.roots import Root
from libs.storage.objects.shard_owners import ShardOwners
from slatemq._rpc.tls import ChannelTls
from slatemq.errors import FailedPrecondition

CONNECT_S: Final = 1.0


async def refuse_running(
    root: Root, directory: TopologyDirectory, database: str, tls: ChannelTls | None
) -> None:
    """Raises FailedPrecondition where a process of the shard answers, or may be there."""
    service, _, shard = database.partition("/")
    name, claimed = (await ShardOwners(root.objects, database).latest()).owner
    announced = (await directory.read(max_age_ms=0)).address(service, int(shard))
    for address in sorted({claimed, announced or ""} - {""}):
        sign = await _sign_at(address, owner_health(database, name), tls)
        if sign in (Sign.LIVES, Sign.STOPS):
            raise FailedPrecondition(
                "SHARD_RUNNING",
                f"the process of {database} runs, at {address}: stop it and its standbys, and what "
                "would start them again; then repeat this",
            )
        if sign is Sign.SILENT and await listens(address, CONNECT_S):
            raise FailedPrecondition(
                "SHARD_RUNNING",
                f"what listens at {address}, where {database} was, does not say whether it is its "
                "process: stop that. With TLS, set SLATEMQ_TLS_CA, SLATEMQ_TLS_CERT and "
                "SLATEMQ_TLS_KEY to the certificate of the services, so that it answers",
            )


async def _sign_at(address: str, health_name: str, tls: ChannelTls | None) -> Sign:
    """What the looks show after which a standby would take the shard, or an answer before."""
    channel = open_channel(address, tls=tls)
    watch = OwnerWatch(channel, address, health_name)
    try:
        while True:
            sign = await watch.look()
            if watch.is_silent or sign in (Sign.LIVES, Sign.STOPS):
                return sign
            await asyncio.sleep(GONE_LOOK_S)
    finally:
        await channel.close()
