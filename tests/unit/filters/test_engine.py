import subprocess
import sys

PROGRAM = """
import sys
from libs.filters import Facts, Filter, context
assert Filter("size(headers) == 1").matches(context(Facts({"a": "b"})))
print(sorted({"prompt_toolkit", "rich", "typer"} & sys.modules.keys()))
"""


def test_filters_work_without_the_command_line_of_the_library_that_evaluates_them() -> None:
    assert subprocess.check_output([sys.executable, "-c", PROGRAM], text=True) == "[]\n"
