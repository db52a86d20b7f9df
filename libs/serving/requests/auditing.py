"""Acts of callers, recorded with their outcome when their call has ended: logged, and as events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import grpc.aio
from opentelemetry import trace

from libs.access.audit import REFUSALS, Act
from libs.access.principals import Principal
from libs.serving.process.logs import AUDIT_LOGGER, Repeats
from libs.serving.requests.calls import code_name
from libs.serving.telemetry import extract
from slatemq._rpc.rpc_status import grpc_code, to_status
from slatemq._secrets import redacted
from slatemq.errors import SlateMQError

Context = grpc.aio.ServicerContext[Any, Any]

READ_FILE: Final = "read-file"
"""The act of a process that takes a new version of a file."""

_log = logging.getLogger(AUDIT_LOGGER)


class PendingAct:
    """An act whose call has not ended.

    gRPC says of a call that its caller has cancelled only that it has ended. So what has become of
    the act is noted where its handler ends, and where nothing is, the act may have taken effect.
    """

    __slots__ = ("outcome",)

    def __init__(self) -> None:
        self.outcome = "CANCELLED"

    def handled(self, error: BaseException | None) -> None:
        """Note that its handler has returned, or raised this error."""
        if error is None:
            self.outcome = "OK"
        elif isinstance(error, SlateMQError):
            self.outcome = grpc_code(to_status(error)).name


class Auditor:
    """Records the acts of one process.

    Every act that was permitted is recorded, whatever became of it. Of refusals of one call to one
    principal, or to all callers whose proof is not good, a few are, then one in a while with the
    number of those between: so a caller that may do nothing cannot fill logs, or the store.
    """

    def __init__(
        self,
        source: str,
        publish: Callable[[Act], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` is the process, as in `broker-3`; `publish` makes an event of an act there."""
        self._source = source
        self._publish = publish
        self._refused = Repeats(clock)

    def watch(
        self,
        context: Context,
        act: str,
        subjects: tuple[str, ...],
        details: tuple[str, ...],
        principal: Principal | None,
        refusal: SlateMQError | None = None,
    ) -> PendingAct:
        """Record the act of a call when it ends; `principal` is None where it was not proven.

        A refusal is what the act ends with, even if its caller ends the call first. Of what is let
        in, the handler's end must be noted before the call ends.
        """
        refused = "" if refusal is None else grpc_code(to_status(refusal)).name
        pending = PendingAct()
        # Now: once a call has ended, reading its connection can end the process (grpcio 1.85).
        peer, request_id = context.peer(), _trace_id(context)

        def ended(context: Context) -> None:
            self.record(
                Act(
                    principal.name if principal is not None else "",
                    principal.method if principal is not None else "",
                    act,
                    subjects,
                    details,
                    peer,
                    refused or code_name(context) or pending.outcome,
                    request_id,
                ),
                is_refused=bool(refused),
            )

        callback: Any = ended
        context.add_done_callback(callback)
        return pending

    def record(self, act: Act, *, is_refused: bool = False) -> None:
        """Record an act, unless it is one refusal of many, be it by a door or by its handler."""
        is_unproven = not act.principal and act.outcome != "OK"
        if is_refused or is_unproven or act.outcome in REFUSALS:
            held_back = self._refused.admit((act.principal, act.act))
            if held_back is None:
                return
            act = replace(act, held_back=held_back)
        # The event is to have no more than the log's lines.
        subjects, details = tuple(map(redacted, act.subjects)), tuple(map(redacted, act.details))
        act = replace(act, subjects=subjects, details=details)
        facts = {"source": self._source} | asdict(act)
        facts |= {"subjects": ", ".join(subjects), "details": ", ".join(details)}
        if not act.details:
            del facts["details"]
        if act.outcome == "OK":
            del facts["held_back"]
            _log.info("audit", extra=facts)
        else:
            _log.warning("audit", extra=facts)
        self._publish(act)

    def record_file(self, file: Path, version: int) -> None:
        """Record that the process has taken a new version of a file that decides who may do what.

        Who wrote the file is not known.
        """
        details = (f"file={file}", f"version={version}")
        self.record(Act("", "file", READ_FILE, (), details, "", "OK", ""))


def _trace_id(context: Context) -> str:
    caller = trace.get_current_span(extract(dict(context.invocation_metadata() or ())))
    found = caller.get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid else ""
