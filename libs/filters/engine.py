"""The evaluating library, without the command line that comes with it.

`import cel` loads a terminal's tool kit as well, which nobody here calls: a third of a second of
each start of a broker or router, and ten megabytes of each.
"""

import sys
from types import ModuleType

sys.modules.setdefault("cel.cli", ModuleType("cel.cli"))

import cel  # noqa: E402 - it looks for its command line while it is loaded

__all__ = ["cel"]
