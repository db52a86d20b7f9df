"""The doors of a process: the port for clients, and the port for services.

::

    clients ──► client door ── who calls? may it? ──► handlers of all services
    services ─► service door ── (mTLS: services alone get in) ──────┘

Each RPC's proto says who may call it (`slatemq/v1/access.proto`). The client door refuses what is
for services, with a policy or without; with one, it asks it about everything else.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio

from libs.access.audit import AUDITED, record_act
from libs.access.current import current_caller
from libs.access.methods import MethodAccess, access_of
from libs.access.principals import Principal
from libs.serving.limits import PROBE_PREFIXES
from libs.serving.tls import identities, is_old
from slatemq.errors import PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from libs.access.callers import Caller, Callers

__all__ = ["ClientDoor", "Door", "Judge", "ServiceDoor"]

Context = grpc.aio.ServicerContext[Any, Any]


class Judge(Protocol):
    """Judges the calls of one method."""

    async def judge(self, context: Context, request: Any) -> None:
        """Let a call be served for its caller, which becomes the current one; or raise.

        Raises:
            Unauthenticated: Who calls is not proven.
            PermissionDenied: The caller may not make this call.
            ResourceExhausted, Unavailable: Who calls cannot be found out now.
        """


class Door(Protocol):
    """One port of a process."""

    def judge_of(self, method: str) -> Judge | None:
        """What judges the calls of a method; None lets all of them in."""


class ServiceDoor:
    """The port for services: its handshake lets in certificates of our authorities alone."""

    def __init__(self, identity: str = "") -> None:
        """Let in those whose certificate has this name; empty, as without TLS: everybody."""
        self._judge = _ByIdentity(identity) if identity else None

    def judge_of(self, method: str) -> Judge | None:
        return None if method.startswith(PROBE_PREFIXES) else self._judge


class ClientDoor:
    """The port for clients."""

    def __init__(self, callers: Callers | None = None) -> None:
        """Judge calls by the policy of `callers`; without one, all may do everything."""
        self._callers = callers

    def judge_of(self, method: str) -> Judge | None:
        try:
            access = access_of(method)
        except LookupError:
            # Nothing says who may call it, so no policy can permit it.
            return None if self._callers is None else _ForServices()
        if access.caller == "anyone":
            return None
        if access.caller == "service":
            return _ForServices()
        return None if self._callers is None else _ByPolicy(self._callers, method, access)


class _ByIdentity:
    def __init__(self, identity: str) -> None:
        self._identity = identity

    async def judge(self, context: Context, request: Any) -> None:
        auth = context.auth_context()
        if is_old(auth):
            raise Unauthenticated("connect with TLS 1.3", reason="OLD_TLS")
        if self._identity not in identities(auth):
            raise PermissionDenied(
                f"the certificate does not have the name {self._identity}",
                reason="FOR_SERVICES_ALONE",
            )


class _ForServices:
    async def judge(self, context: Context, request: Any) -> None:
        raise PermissionDenied(
            "only services call this, on their own port", reason="FOR_SERVICES_ALONE"
        )


class _ByPolicy:
    def __init__(self, callers: Callers, method: str, access: MethodAccess) -> None:
        self._callers = callers
        self._method = method
        self._access = access

    async def judge(self, context: Context, request: Any) -> None:
        authorization = ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                authorization = value if isinstance(value, str) else value.decode("latin-1")
                break
        caller = self._callers.known(authorization) if authorization else None
        if caller is None:
            caller = await self._find(context, authorization)
        if self._access.caller in AUDITED:
            record: Any = partial(self._record, caller.principal, request)
            context.add_done_callback(record)
        caller.check(self._access, request)
        current_caller.set(caller)

    def _record(self, principal: Principal, request: Any, context: Context) -> None:
        subjects = ", ".join(dict.fromkeys(self._access.queues(request)))
        code: Any = context.code()
        outcome = "OK" if not code else getattr(code, "name", str(code))
        record_act(principal, self._method, subjects, context.peer(), outcome)

    async def _find(self, context: Context, authorization: str) -> Caller:
        auth = context.auth_context()
        if is_old(auth):
            raise Unauthenticated("connect with TLS 1.3", reason="OLD_TLS")
        return await self._callers.find(authorization, identities(auth))
