"""Queue files need Python and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
before = set(sys.modules)
import slatemq.textqueue
for name in slatemq.textqueue.__all__:
    getattr(slatemq.textqueue, name)
for name in sorted(set(sys.modules) - before):
    print(name)
"""


def test_importing_it_imports_nothing_else_of_ours_or_of_others() -> None:
    out = subprocess.check_output([sys.executable, "-c", PROGRAM], cwd=ROOT, text=True)

    others = {
        name
        for name in out.split()
        if name.split(".")[0] not in sys.stdlib_module_names
        and name != "slatemq"
        and not name.startswith("slatemq.textqueue")
    }
    assert others == set()
    assert "slatemq.textqueue.queue" in out.split()
