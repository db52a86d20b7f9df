"""What gRPC says of connections that fail, in plain words."""

import grpc
import grpc.aio
import pytest

from slatemq._rpc.connection_faults import connection_fault
from slatemq._rpc.peers import translated
from slatemq._rpc.rpc_status import from_rpc_error

BEGIN = "failed to connect to all addresses; last error: "
BROKER = "broker 0 at queue.example:4567"


def failed(details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.RpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, none, none, details)


@pytest.mark.parametrize(
    ("details", "address", "why"),
    [
        (
            f"{BEGIN}UNKNOWN: ipv4:127.0.0.1:4567: Failed to connect to remote host: Connection "
            "refused",
            "127.0.0.1:4567",
            "connection refused: no process listens there",
        ),
        (
            f"{BEGIN}UNKNOWN: ipv6:%5B::1%5D:4567: Failed to connect to remote host: connect: "
            "Connection refused (111)",
            "[::1]:4567",
            "connection refused: no process listens there",
        ),
        (
            f"{BEGIN}UNKNOWN: ipv4:10.0.0.1:4567: connection attempt timed out before receiving "
            "SETTINGS frame",
            "10.0.0.1:4567",
            "it did not answer in time",
        ),
        (
            f"{BEGIN}UNKNOWN: ipv4:10.0.0.1:4567: Failed to connect to remote host: Timeout "
            "occurred: FD Shutdown",
            "10.0.0.1:4567",
            "it did not answer in time",
        ),
        (
            "errors resolving broker-0.broker:4567: [field:hostname lookup error:address lookup "
            "failed for broker-0.broker:4567: Domain name not found]",
            "broker-0.broker:4567",
            "its host name cannot be resolved",
        ),
        (
            "DNS resolution failed for broker-0.broker:4567: C-ares status is not ARES_SUCCESS "
            "qtype=A name=broker-0.broker is_balancer=0: Domain name not found",
            "",
            "its host name cannot be resolved",
        ),
        (
            f"{BEGIN}UNKNOWN: ipv4:127.0.0.1:4567: Tls handshake failed (TSI_PROTOCOL_FAILURE): "
            "SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED",
            "127.0.0.1:4567",
            "its certificate is not trusted",
        ),
        (
            f"{BEGIN}UNAVAILABLE: ipv4:127.0.0.1:4567: Handshake read failed (Socket closed)",
            "127.0.0.1:4567",
            "it closed the connection",
        ),
        (f"{BEGIN}what no version has said before", "", "no connection came about"),
    ],
)
def test_a_call_that_was_not_sent_says_which_process_cannot_be_reached_and_why(
    details: str, address: str, why: str
) -> None:
    error = translated(failed(details), BROKER)
    assert error.reason == "NOT_CONNECTED"
    assert error.message == f"{BROKER} cannot be reached: {why}"

    unnamed = f"the process at {address}" if address else "the server"
    assert translated(failed(details)).message == f"{unnamed} cannot be reached: {why}"
    assert from_rpc_error(failed(details)).message == f"{unnamed} cannot be reached: {why}"


@pytest.mark.parametrize(
    "details",
    [
        "Socket closed",
        "Stream removed (Socket closed)",
        "Cancelling all calls",
        "recvmsg:Connection reset by peer",
        "GOAWAY received; Error code: 0; Debug Text: graceful_stop",
    ],
)
def test_a_connection_that_ends_under_a_call_is_said_to_be_broken(details: str) -> None:
    error = translated(failed(details), BROKER)
    assert error.message == f"the connection to {BROKER} broke"
    assert error.reason != "NOT_CONNECTED"  # It may have taken effect.


def test_a_server_without_an_answer_to_pings_is_silent() -> None:
    error = translated(failed("ping timeout"), BROKER)
    assert (error.message, error.reason) == (f"{BROKER} answers no ping", "PEER_SILENT")


def test_a_call_without_an_answer_names_its_process() -> None:
    late = failed("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert translated(late, BROKER).message == f"{BROKER} did not answer in time"
    assert translated(late).message == "no answer came in time"


def test_a_stream_that_ends_while_something_is_written_is_of_a_broken_connection() -> None:
    error = translated(failed("Received RST_STREAM with error code 2", grpc.StatusCode.INTERNAL))
    assert error.reason == "CONNECTION_BROKEN"
    assert error.message == "the connection to the server broke"


def test_what_a_server_says_stays_as_it_is() -> None:
    assert connection_fault("the queue is moving") is None
    error = from_rpc_error(failed("Connection refused", grpc.StatusCode.NOT_FOUND))
    assert error.message == "Connection refused"


def test_the_words_of_grpc_are_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "slatemq"):
        translated(failed(f"{BEGIN}UNKNOWN: ipv4:127.0.0.1:4567: Connection refused"), BROKER)
    assert any(BEGIN in record.getMessage() for record in caplog.records)
