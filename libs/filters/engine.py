"""The evaluating library, without its command line.

`import cel` would also load a toolkit for terminals, which costs each start of a broker or router a
third of a second and ten megabytes.
"""

import sys
from types import ModuleType

sys.modules.setdefault("cel.cli", ModuleType("cel.cli"))

import cel  # noqa: E402 - it imports its command line

__all__ = ["cel"]
