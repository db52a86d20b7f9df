"""Failures of calls to other processes, as the log has them."""

import grpc
import grpc.aio
import pytest

from libs.serving.peers.calls import PeerFailed, peer_failures
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import Unavailable

REFUSED = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE,
    grpc.aio.Metadata(),
    grpc.aio.Metadata(),
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:4567: Failed to "
    "connect to remote host: Connection refused",
)

SAID = (
    "the process at 127.0.0.1:4567 cannot be reached: connection refused: no process listens there"
)


def test_a_peer_that_is_down_is_named_by_its_address_in_plain_words() -> None:
    with pytest.raises(PeerFailed) as failed, peer_failures():
        raise REFUSED
    assert str(failed.value) == f"UNAVAILABLE: {SAID}"


def test_so_it_is_where_the_error_goes_to_a_caller() -> None:
    with pytest.raises(Unavailable) as failed, raising_slatemq_errors():
        raise REFUSED
    assert failed.value.message == SAID
