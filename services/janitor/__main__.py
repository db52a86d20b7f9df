"""`python -m services.janitor`: one janitor process.

`… sql 'SELECT …'`: a question, answered. `… backup`, `… verify`, `… move-wals` and `… give-up`
work on the root of an instance, as `--help` of each says.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from libs.serving.main import main
from libs.serving.process.exits import exit_with
from libs.storage.objects.durability import write_privately
from services.janitor.command_lines import begin_command
from services.janitor.config import JanitorConfig
from services.janitor.service import JanitorProcess

if __name__ == "__main__":
    write_privately()
    if sys.argv[1:2] == ["sql"]:
        # Loaded when asked for: it brings Spark, which a process that serves never has in memory.
        exit_with(import_module("services.janitor.spark.sql").main(sys.argv[1:], os.environ))
    rooms = {"move-wals": "moving", "give-up": "giving_up", "backup": "backup", "verify": "verify"}
    if room := rooms.get("".join(sys.argv[1:2])):
        begin_command()
        command = import_module(f"services.janitor.{room}.command")
        exit_with(command.main(sys.argv[1:], os.environ))
    main("janitor", JanitorConfig, JanitorProcess)
