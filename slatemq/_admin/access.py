"""What the policy of the instance permits, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import grpc.aio

from slatemq._checks import check_kind, check_text, moved
from slatemq._requests import fields_of, message_of
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import InvalidArgument
from slatemq.models import AccessCheck, AccessRule
from slatemq.v1 import access_check_pb2, access_pb2
from slatemq.v1.access_check_pb2_grpc import AccessServiceStub

_VERBS: Final = {
    name.removeprefix("VERB_").lower(): number for name, number in access_pb2.Verb.items() if number
}


class AccessCalls(Calls):
    """Asking what the policy permits; a part of the client."""

    async def check_access(
        self,
        principal: str,
        verb: str,
        queue_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        attributes: Mapping[str, str | Sequence[str]] | None = None,
    ) -> AccessCheck:
        """Explains what the policy permits a principal, by what one process has loaded.

        No queue: all queues, or a message without the header `queue`. `headers` are the others of
        the message to publish, `attributes` what the principal's token says of it. Raises
        PermissionDenied (it takes the verb `operate`), FailedPrecondition (NO_POLICY),
        InvalidArgument, Unavailable.
        """
        check_text("verb", verb)
        if verb not in _VERBS:
            raise InvalidArgument("verb", f"must be one of {', '.join(_VERBS)}, not {verb!r}")
        request = message_of(
            access_check_pb2.CheckAccessRequest,
            principal=principal,
            verb=_VERBS[verb],
            queue_id=queue_id,
            headers={} if headers is None else headers,
        )
        attributes = {} if attributes is None else attributes
        check_kind("attributes", attributes, Mapping, "a mapping of text to text or lists of text")
        for name, value in attributes.items():
            check_text("attributes", name)
            try:
                listed = message_of(
                    access_check_pb2.AttributeValues,
                    values=[value] if isinstance(value, str) else value,
                    is_list=not isinstance(value, str),
                )
            except InvalidArgument as error:
                raise moved(error, f"attributes[{name!r}]") from None
            request.attributes[name].CopyFrom(listed)
        address = await self._peers.any_address()

        async def process() -> grpc.aio.Channel:
            return self._peers.at(address)

        response = await self._peers.ask(
            process, lambda channel: AccessServiceStub(channel).CheckAccess, request
        )
        values = fields_of(response, AccessCheck)
        rules = [
            AccessRule(**{**fields_of(rule, AccessRule), "finding": _finding(rule.finding)})
            for rule in response.rules
        ]
        return AccessCheck(
            **{**values, "rules": rules, "roles": list(response.roles), "address": address}
        )


def _finding(number: access_check_pb2.RuleVerdict.Finding.ValueType) -> str:
    name = access_check_pb2.RuleVerdict.Finding.Name(number)
    return name.removeprefix("FINDING_").lower()
