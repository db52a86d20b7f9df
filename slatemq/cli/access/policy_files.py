"""What a policy file permits, judged here: by the code that the services load it with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slatemq.cli.failures import BadInput
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from slatemq.models import AccessCheck

EXPLANATIONS = "libs.access.explanations"
"""Not in the package `slatemq`, which has no code of the services."""


def judge_by_file(
    file: Path,
    principal: str,
    verb: str,
    queue: str,
    headers: Mapping[str, str],
    attributes: Mapping[str, str | list[str]],
) -> AccessCheck:
    """The judgement of a policy file. Raises BadInput: the file is bad, or packages are missing."""
    models: Any = import_module("slatemq.models")
    try:
        judge: Any = import_module(EXPLANATIONS).judge_file
    except ModuleNotFoundError as error:
        raise BadInput(
            f"--policy takes the packages of the services, and {error.name} is not installed: use "
            "a checkout of SlateMQ (`make setup`), or leave out --policy and ask a service"
        ) from error
    try:
        found = judge(file, principal, verb, queue, headers, attributes)
    except InvalidArgument as error:
        raise BadInput(error.message) from error
    judged: AccessCheck = models.AccessCheck(
        permitted=found.is_permitted,
        reason=found.reason,
        rules=found.rules,
        roles=list(found.roles),
        policy_file=str(file),
        policy_version=0,
        loaded_at_ms=0,
        address="",
    )
    return judged
