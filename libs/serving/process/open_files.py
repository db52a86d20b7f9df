"""How many files a process may have open: connections and the store's tables are files."""

from __future__ import annotations

import resource
from typing import Final

OPEN_FILES_MAX: Final = 65_536
"""More than any process of ours opens."""


def allow_open_files() -> None:
    """Raise the soft limit, which is often 1,024, towards the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
