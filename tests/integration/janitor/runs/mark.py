"""By what tests find the processes of a janitor: their environment, or their name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MARK: Final = "JANITOR_TEST_MARK"

NAME_BYTES_MAX: Final = 15
"""What the kernel keeps of a name."""


def bear() -> None:
    """Bear the mark as a name: the kernel shows the environment of a fork as that of its parent."""
    Path("/proc/self/comm").write_text(os.environ[MARK][:NAME_BYTES_MAX])
