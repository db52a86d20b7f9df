"""Reports are forgotten, the oldest first; what someone has put beside them stays."""

from __future__ import annotations

from libs.storage.database.roots import open_root
from services.janitor.jobs.report import FOLDER, forget_reports


async def test_only_the_newest_reports_stay() -> None:
    objects = open_root("memory:///").objects
    runs = [
        "20260101-000000-000-report-aaaaaa",
        "20260101T120000Z-0badcafe",  # of a program of one's own
        "20260102-000000-000-report-bbbbbb",
        "20260102-000000-001-report-aaaaaa",
    ]
    for run in runs:
        for name in ("report.parquet", "report.html"):
            await objects.put(f"{FOLDER}/{run}/{name}", b"")
    others = [f"{FOLDER}/2025/report.html", f"{FOLDER}/{runs[0]}/notes.txt", f"{FOLDER}/readme"]
    for path in others:
        await objects.put(path, b"")

    assert await forget_reports(objects, 4) == 0
    assert await forget_reports(objects, 2) == 2

    left = [
        f"{FOLDER}/{run}/{name}" for run in runs[2:] for name in ("report.html", "report.parquet")
    ]
    assert await objects.list(FOLDER) == sorted([*left, *others])
    assert await forget_reports(objects, 2) == 0
