"""AccessService, which every process serves: what its policy permits, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libs.access.current import caller_name, current_caller
from libs.access.principals import ATTRIBUTES_MAX, NAME_LENGTH_MAX, Attributes, Principal
from libs.access.verbs import VERBS, Verb
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import access_check_pb2, access_check_pb2_grpc, access_pb2

if TYPE_CHECKING:
    from libs.access.callers import Callers

_VERBS: dict[int, Verb] = {access_pb2.Verb.Value(f"VERB_{verb.upper()}"): verb for verb in VERBS}


class AccessServicer(access_check_pb2_grpc.AccessServiceServicer):
    def __init__(self, callers: Callers | None) -> None:
        """Explain the policy of these callers; None: there is none."""
        self._callers = callers

    async def CheckAccess(
        self, request: access_check_pb2.CheckAccessRequest, context: Any
    ) -> access_check_pb2.CheckAccessResponse:
        verb = _checked_verb(request)
        if not 1 <= len(request.principal) <= NAME_LENGTH_MAX:
            raise InvalidArgument("principal", f"must have 1 to {NAME_LENGTH_MAX} characters")
        if len(request.attributes) > ATTRIBUTES_MAX:
            raise InvalidArgument("attributes", f"has at most {ATTRIBUTES_MAX}")
        if self._callers is None:
            raise FailedPrecondition(
                "NO_POLICY",
                "this process runs without a policy, so every caller may do everything: set "
                "--access-policy",
            )
        principal = Principal(request.principal, "none", _attributes(request))
        headers = dict(request.headers)
        policy, found = self._callers.explain(principal, verb, request.queue_id, headers)
        return access_check_pb2.CheckAccessResponse(
            permitted=found.is_permitted,
            reason=found.reason,
            rules=[
                access_check_pb2.RuleVerdict(
                    place=one.place,
                    line=one.line,
                    binding=one.binding,
                    binding_line=one.binding_line,
                    finding=access_check_pb2.RuleVerdict.Finding.Value(
                        f"FINDING_{one.finding.upper()}"
                    ),
                    detail=one.detail,
                )
                for one in found.rules
            ],
            roles=found.roles,
            policy_file=str(policy.file),
            policy_version=policy.version,
            loaded_at_ms=policy.loaded_at_ms,
        )

    async def GetCaller(
        self, request: access_check_pb2.GetCallerRequest, context: Any
    ) -> access_check_pb2.GetCallerResponse:
        caller = current_caller.get()
        verbs = [
            access_pb2.Verb.ValueType(number)
            for number, verb in _VERBS.items()
            if caller is None or caller.rights.permits_some(verb)
        ]
        return access_check_pb2.GetCallerResponse(
            principal=caller_name(),
            verbs=verbs,
            inspected_queues=["*"] if caller is None else caller.rights.queue_patterns("inspect"),
        )


def _checked_verb(request: access_check_pb2.CheckAccessRequest) -> Verb:
    verb = _VERBS.get(request.verb)
    if verb is None:
        raise InvalidArgument("verb", f"must be one of {', '.join(VERBS)}")
    if request.headers and verb != "publish":
        raise InvalidArgument("headers", "are judged for VERB_PUBLISH alone: leave them out")
    if "queue" in request.headers:
        raise InvalidArgument("headers", "must not have `queue`: name the queue as queue_id")
    if request.queue_id and verb == "operate":
        raise InvalidArgument("queue_id", "must be empty: VERB_OPERATE covers the whole instance")
    return verb


def _attributes(request: access_check_pb2.CheckAccessRequest) -> Attributes:
    made: dict[str, str | list[str]] = {}
    for name, value in request.attributes.items():
        if len(value.values) != 1 and not value.is_list:
            raise InvalidArgument(
                f"attributes[{name!r}]", "must have exactly one value unless is_list is set"
            )
        made[name] = list(value.values) if value.is_list else value.values[0]
    return made
