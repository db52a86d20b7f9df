"""Volumes of Secrets and ConfigMaps, laid and changed as a kubelet does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path


class Volume:
    """A folder whose files change together.

    ::

        tls.crt ──► ..data/tls.crt      ..data ──► ..1      the next content is laid as ..2, then
                                                            ..data is replaced in one step
    """

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        folder.mkdir()
        self.folder = folder
        self._version = 0
        self.change(files)
        for name in files:
            (folder / name).symlink_to(Path("..data") / name)

    def change(self, files: Mapping[str, bytes], own: Callable[[], None] = lambda: None) -> None:
        """Give all files other content, at once; `own` gives what is laid to those who read it."""
        self._version += 1
        content = self.folder / f"..{self._version}"
        content.mkdir()
        for name, data in files.items():
            (content / name).write_bytes(data)
            (content / name).chmod(0o440)
        own()
        (link := self.folder / "..data_tmp").symlink_to(content.name)
        os.replace(link, self.folder / "..data")
