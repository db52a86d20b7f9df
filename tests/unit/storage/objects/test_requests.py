"""What is counted of requests, compared with what an endpoint of S3 gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects

PAGE = 1_000
MIB = 1 << 20

KINDS = {"GET": "get", "HEAD": "head", "PUT": "put", "POST": "put", "DELETE": "delete"}
"""As stores charge for them; a GET that lists is another kind."""


class Endpoint(NamedTuple):
    """The small objects below a root in it, and what it was asked for since."""

    objects: Objects
    asked: Counter[str]

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """What was counted, and what was asked, since the last time."""
        counted, asked = dict(self.objects.counts.requests), dict(self.asked)
        self.objects.counts.requests.clear()
        self.asked.clear()
        return counted, asked


@asynccontextmanager
async def served(objects_count: int) -> AsyncIterator[Endpoint]:
    """An endpoint whose every folder has that many objects, and which takes all that is put."""
    asked = Counter[str]()

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        query = request.rel_url.query
        is_listing = "list-type" in query
        asked["list" if is_listing else KINDS[request.method]] += 1
        if is_listing:
            return _xml(_page(int(query.get("continuation-token", 0)), objects_count))
        if request.method == "POST":
            is_begin = "uploads" in query
            return _xml(
                "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
                if is_begin
                else "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
            )
        return web.Response(headers={"ETag": '"e"'})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    root = open_root(f"s3://bucket/root?endpoint=http://127.0.0.1:{port}&allow_http=true")
    try:
        yield Endpoint(root.objects, asked)
    finally:
        await runner.cleanup()


def _page(start: int, count: int) -> str:
    end = min(start + PAGE, count)
    more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < count else ""
    listed = "".join(
        f"<Contents><Key>root/f/{number:06}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for number in range(start, end)
    )
    is_truncated = str(end < count).lower()
    return (
        f"<ListBucketResult><IsTruncated>{is_truncated}</IsTruncated>{more}{listed}"
        "</ListBucketResult>"
    )


def _xml(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/xml")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "test")


@pytest.mark.parametrize("count", [0, 1, 50, 51, 999, 1_000, 1_001, 2_500])
async def test_a_listing_counts_as_the_pages_that_it_asks_for(count: int) -> None:
    async with served(count) as endpoint:
        assert len(await endpoint.objects.list("f")) == count
        counted, asked = endpoint.take()
        assert counted == asked == {"list": max(1, -(-count // PAGE))}

        await endpoint.objects.folders("f")
        counted, asked = endpoint.take()
        assert counted == asked


@pytest.mark.parametrize(
    "size", [0, 1, 5 * MIB, 5 * MIB + 1, 10 * MIB, 10 * MIB + 1, 64 * MIB], ids=str
)
async def test_a_put_counts_as_the_parts_that_it_sends(size: int) -> None:
    async with served(0) as endpoint:
        await endpoint.objects.put("large", bytes(size))
        counted, asked = endpoint.take()
        assert counted == asked

        await endpoint.objects.put_if_absent("large", bytes(size))
        counted, asked = endpoint.take()
        assert counted == asked == {"put": 1}


async def test_a_copy_in_pieces_counts_as_the_parts_that_it_sends(tmp_path: Path) -> None:
    source = open_root(tmp_path.as_uri()).objects
    for size in (8 * MIB, 8 * MIB + 1, 33 * MIB):
        await source.put("object", bytes(size))
        async with served(0) as endpoint:
            await source.copy_to("object", endpoint.objects, "object")
            counted, asked = endpoint.take()
            assert counted == asked
