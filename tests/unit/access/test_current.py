"""What the caller of a call may do, and what limits count of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.access.callers import Callers
from libs.access.current import current_caller, headers_size, require_some
from libs.access.policy import Policy
from libs.access.principals import Principal
from libs.access.reloading import ReloadedFile
from slatemq.errors import PermissionDenied

POLICY = """
roles:
  own:
    - {verbs: [inspect], queues: ["own-*"]}
bindings:
  - {principals: [tenant], roles: [own]}
"""


def test_headers_count_by_their_bytes() -> None:
    assert headers_size({}) == 0
    assert headers_size({"tenant": "acme"}) == 10
    assert headers_size({"name": "müller", "ä": "😀"}) == 4 + 7 + 2 + 4


def test_who_may_do_none_of_some_things_is_shown_all_of_them(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    callers = Callers(ReloadedFile.of_document(policy, Policy))
    before = current_caller.set(callers._caller(Principal("tenant", "token")))
    try:
        require_some(("consume", "inspect", "edit"), "own-1")
        with pytest.raises(PermissionDenied) as caught:
            require_some(("consume", "inspect", "edit"), "bills")
    finally:
        current_caller.reset(before)

    assert caught.value.message == "no rule permits 'tenant' to consume, inspect or edit 'bills'"
    assert caught.value.metadata == {"queue": "bills"}
    require_some(("consume", "inspect"), "bills")
