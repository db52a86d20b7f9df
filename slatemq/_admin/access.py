"""What the policy of the instance permits, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc.aio

from slatemq._checks import fields_of, message_of
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import InvalidArgument
from slatemq.v1 import access_check_pb2, access_pb2
from slatemq.v1.access_check_pb2_grpc import AccessServiceStub

_VERBS: Final = {
    name.removeprefix("VERB_").lower(): number for name, number in access_pb2.Verb.items() if number
}


@dataclass(frozen=True, slots=True)
class AccessRule:
    """What one rule of the policy says.

    Attributes:
        place: Where it stands: `roles.shop[0]` is the first rule of the role `shop`.
        line: Its line in the policy file.
        binding: By which the principal has it, as in `bindings[1]`.
        binding_line: The line of that.
        finding: `permits`, `other_queues`, `condition_false` or `condition_failed`.
        detail: Its queues, or its condition with the values that it read.
    """

    place: str
    line: int
    binding: str
    binding_line: int
    finding: str
    detail: str


@dataclass(frozen=True, slots=True)
class AccessCheck:
    """Whether a policy permits something, and why.

    Attributes:
        permitted: Whether it does.
        reason: Why, in a sentence.
        rules: Those with the verb that the principal has. The last is the one that permits it.
        roles: That are bound to the principal.
        policy_file: The file, as the process that answered names it.
        policy_version: How many versions of it that process has loaded.
        loaded_at_ms: When it loaded this one, in ms since the Unix epoch.
        address: Of that process.
    """

    permitted: bool
    reason: str
    rules: Sequence[AccessRule]
    roles: Sequence[str]
    policy_file: str
    policy_version: int
    loaded_at_ms: int
    address: str


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

        No queue: all queues, or a message without the header `queue`. `headers` are those of the
        message to publish, `attributes` what the principal's token says of it. Raises
        PermissionDenied (it takes the verb `operate`), FailedPrecondition (NO_POLICY),
        InvalidArgument, Unavailable.
        """
        if verb not in _VERBS:
            raise InvalidArgument("verb", f"must be one of {', '.join(_VERBS)}, not {verb!r}")
        request = message_of(
            access_check_pb2.CheckAccessRequest,
            principal=principal,
            verb=_VERBS[verb],
            queue_id=queue_id,
            headers=headers or {},
        )
        for name, value in (attributes or {}).items():
            request.attributes[name].CopyFrom(
                message_of(
                    access_check_pb2.AttributeValues,
                    values=[value] if isinstance(value, str) else value,
                    is_list=not isinstance(value, str),
                )
            )
        topology = await self._peers.topology()
        processes = (topology.ingests, topology.brokers, topology.routers, topology.janitors)
        address = next(address for shards in processes for address in shards.values())

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
