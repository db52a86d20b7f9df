"""py-spy on each of our processes while a workload runs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FORMATS = {"raw": "txt", "speedscope": "json", "flamegraph": "svg"}
HZ = 200
END_S = 30


@dataclass(frozen=True, slots=True)
class Profiling:
    """Where profiles go, as FOLDER/WORKLOAD-PROCESS.EXT, and in which of py-spy's formats."""

    folder: Path
    form: str = "raw"
    native: bool = False

    @contextmanager
    def of(self, pids: Mapping[str, int], workload: str) -> Iterator[None]:
        """Records these processes until the block ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        running = [
            subprocess.Popen(self._command(pid, f"{workload}-{name}"), stdout=subprocess.DEVNULL)
            for name, pid in pids.items()
            if name != "launcher"
        ]
        try:
            yield
        finally:
            for one in running:
                one.send_signal(signal.SIGINT)
            for one in running:
                try:
                    one.wait(END_S)
                except subprocess.TimeoutExpired:
                    one.kill()
                    one.wait()

    def _command(self, pid: int, name: str) -> list[str]:
        beside = Path(sys.executable).with_name("py-spy")
        program = str(beside) if beside.exists() else shutil.which("py-spy") or "py-spy"
        return [
            *(program, "record", "--pid", str(pid), "--rate", str(HZ), "--format", self.form),
            *("--duration", "unlimited", "--native" if self.native else "--nonblocking"),
            *("--output", str(self.folder / f"{name}.{FORMATS[self.form]}")),
        ]
