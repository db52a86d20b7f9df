"""What CheckAccess refuses; tests/integration/stack/test_secured_stack.py has what it answers."""

from __future__ import annotations

from typing import Any

import pytest

from libs.serving.access_servicer import AccessServicer
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import access_pb2
from slatemq.v1.access_check_pb2 import AttributeValues, CheckAccessRequest

PUBLISH, OPERATE = access_pb2.VERB_PUBLISH, access_pb2.VERB_OPERATE


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("verb", {"principal": "p"}),
        ("verb", {"principal": "p", "verb": 99}),
        ("principal", {"verb": PUBLISH}),
        ("principal", {"verb": PUBLISH, "principal": "p" * 256}),
        ("headers", {"verb": OPERATE, "principal": "p", "headers": {"a": "b"}}),
        ("headers", {"verb": PUBLISH, "principal": "p", "headers": {"queue": "q"}}),
        ("queue_id", {"verb": OPERATE, "principal": "p", "queue_id": "q"}),
        (
            "attributes",
            {
                "verb": PUBLISH,
                "principal": "p",
                "attributes": {str(n): AttributeValues(values=["x"]) for n in range(65)},
            },
        ),
    ],
)
async def test_a_bad_request_is_refused_by_the_name_of_its_field(
    field: str, given: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await AccessServicer(None).CheckAccess(CheckAccessRequest(**given), None)

    assert refused.value.field == field


async def test_a_process_without_a_policy_says_that_everything_is_permitted() -> None:
    request = CheckAccessRequest(principal="p", verb=PUBLISH)

    with pytest.raises(FailedPrecondition, match="every caller may do everything") as refused:
        await AccessServicer(None).CheckAccess(request, None)

    assert refused.value.reason == "NO_POLICY"
