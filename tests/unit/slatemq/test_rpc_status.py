import pytest
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from slatemq import errors
from slatemq._rpc.rpc_status import ERROR_DOMAIN, from_status, to_status

ONE_OF_EACH: list[errors.SlateMQError] = [
    errors.InvalidArgument("messages[3].headers", "at most 255", metadata={"index": "3"}),
    errors.Unauthenticated("the token has expired", reason="TOKEN_REFUSED"),
    errors.PermissionDenied("no rule permits 'shop' to operate"),
    errors.NotFound("queue", "orders"),
    errors.AlreadyExists("queue", "orders"),
    errors.FailedPrecondition("LEASE_EXPIRED", "the lease ended", subject="lease 12"),
    errors.Aborted("the queue changed", etag="7"),
    errors.ResourceExhausted("too many claims wait", retry_after_ms=1_500, reason="CLAIMS"),
    errors.Unavailable("ingest 3 is down", retry_after_ms=250),
    errors.DeadlineExceeded("no answer"),
    errors.Unimplemented("call a broker", reason="WRONG_SERVICE", metadata={"served_by": "broker"}),
    errors.DataLoss("payload 42 is gone"),
    errors.Internal("a fault"),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda e: type(e).__name__)
def test_an_error_crosses_the_wire_unchanged(error: errors.SlateMQError) -> None:
    # When it becomes bytes and comes back
    back = from_status(Status.FromString(to_status(error).SerializeToString()))

    # Then nothing of it is lost
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_every_public_kind_is_in_the_table() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__} - {errors.SlateMQError}

    assert {type(error) for error in ONE_OF_EACH} == kinds


def test_every_status_names_reason_and_domain() -> None:
    for error in ONE_OF_EACH:
        info = error_details_pb2.ErrorInfo()
        assert to_status(error).details[0].Unpack(info)
        assert (info.reason, info.domain) == (error.reason, ERROR_DOMAIN)


def test_a_bad_field_is_a_bad_request_violation() -> None:
    status = to_status(errors.InvalidArgument("queue_id", "must not be empty"))

    found = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(found)
    violation = found.field_violations[0]
    assert (violation.field, violation.description) == ("queue_id", "must not be empty")


def test_a_subclass_of_a_kind_travels_as_that_kind() -> None:
    class LeaseLost(errors.FailedPrecondition):
        """One kind's child."""

    status = to_status(LeaseLost("LEASE_NOT_HELD", "lost"))

    assert status.code == code_pb2.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (code_pb2.UNKNOWN, errors.Internal, "UNKNOWN"),
        (code_pb2.UNIMPLEMENTED, errors.Unimplemented, "UNIMPLEMENTED"),
        (code_pb2.CANCELLED, errors.Unavailable, "CANCELLED"),
        (code_pb2.UNAVAILABLE, errors.Unavailable, "UNAVAILABLE"),
        (code_pb2.NOT_FOUND, errors.NotFound, "RESOURCE_NOT_FOUND"),
        (999, errors.Internal, "UNKNOWN"),
    ],
)
def test_a_status_without_details_still_has_a_kind_and_a_reason(
    code: int, kind: type[errors.SlateMQError], reason: str
) -> None:
    error = from_status(Status(code=code, message="said a proxy"))

    assert type(error) is kind
    assert error.reason == reason
    assert error.message == "said a proxy"


@pytest.mark.parametrize("retry_after_ms", [None, 0, 1500])
def test_whether_waiting_helps_crosses_the_wire(retry_after_ms: int | None) -> None:
    error = errors.ResourceExhausted("full", retry_after_ms=retry_after_ms)

    status = to_status(error)

    kinds = [one.TypeName() for one in status.details]
    assert ("google.rpc.RetryInfo" in kinds) is (retry_after_ms is not None)
    read = from_status(status)
    assert isinstance(read, errors.ResourceExhausted)
    assert read.retry_after_ms == retry_after_ms


def test_an_ok_status_is_no_error() -> None:
    with pytest.raises(ValueError, match="not an error"):
        from_status(Status())


@given(
    message=st.text(st.characters(), max_size=5_000),
    field=st.text(st.characters(), max_size=1_000),
)
def test_no_text_makes_a_status_that_trailers_cannot_hold(message: str, field: str) -> None:
    # Given any text, lone surrogates included
    error = errors.InvalidArgument(field, message)

    # When it becomes a status
    status = to_status(error)

    # Then text and base64 of the details stay under the 8 KiB that peers accept
    assert 3 * len(status.message.encode()) + 4 * status.ByteSize() // 3 < 8_192
