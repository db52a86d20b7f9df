"""Short forms of `python -m tests.faults hostile`, and what no client may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from slatemq._rpc.rpc_status import from_rpc_error
from tests.faults.hostile.http2 import Answer
from tests.faults.hostile.raw_calls import answers
from tests.faults.hostile.rpcs import all_rpcs
from tests.faults.hostile.run import run_hostile
from tests.faults.hostile.target import Target, running
from tests.forms import shortly

pytestmark = pytest.mark.stack

REQUESTS = 500


@pytest.mark.parametrize("form", shortly(["plain", "secured"], "plain"))
async def test_hostile_clients_break_nothing_and_others_are_served(
    tmp_path: Path, form: str
) -> None:
    verdict = await run_hostile(
        tmp_path, seed=1, requests=REQUESTS, secured=form == "secured", quiet=True, ready=True
    )

    assert verdict.faults == []
    assert verdict.codes["INVALID_ARGUMENT"] > REQUESTS / 10
    assert verdict.counts["batches_compared"]


async def refusal_at(target: Target, path: str, kind: str) -> str:
    make: Any = target.channel(kind, "clients").unary_stream(path)
    try:
        async for _ in make(b"", timeout=60, metadata=target.authorization("ops", 0)):
            break
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "not refused"


@pytest.mark.parametrize("form", shortly(["plain", "secured"], "plain"))
async def test_no_client_reaches_a_call_of_services(tmp_path: Path, form: str) -> None:
    async with running(tmp_path, secured=form == "secured", ready=True) as target:
        of_services = [rpc for rpc in all_rpcs() if rpc.caller == "service"]
        assert {rpc.path.rpartition("/")[2] for rpc in of_services} >= {
            *("Assign", "Push", "TailLog", "ReplaceMessage", "RemoveEntries", "PurgeMessages"),
            *("RaisePurgeEpoch", "CreateSnapshot", "ForgetMessage", "QuarantineQueue"),
        }
        for rpc in of_services:
            for kind in rpc.kinds:
                assert await refusal_at(target, rpc.path, kind) == "FOR_SERVICES_ALONE", rpc.path
        if form == "plain":
            # A call made by hand is understood: else the floods would prove nothing.
            # One of two, since it has seconds to answer.
            port = target.ports["broker", "clients"]
            assert Answer(0, "trailers") in [await answers(port) for _ in range(2)]
