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


SERVICES = """
import sys
import services.console.__main__, services.ingest.service, services.janitor.__main__
print(sorted({"celpy", "lark", "pendulum"} & sys.modules.keys()))
"""


def test_a_service_without_expressions_does_not_load_what_parses_them() -> None:
    assert subprocess.check_output([sys.executable, "-c", SERVICES], text=True) == "[]\n"
