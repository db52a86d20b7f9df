"""Static tokens, good and bad, and files that are read again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.access import reloading, token_file
from libs.access.reloading import ReloadedFile
from libs.access.token_file import TokenEntry, TokenFile
from libs.documents import Document
from slatemq._tokens import hash_token, new_token
from slatemq.errors import InvalidArgument, Unauthenticated
from tests.unit.access.access_files import Files, bearer

pytestmark = pytest.mark.usefixtures("cheap_hashes")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_a_static_token_proves_its_principal(files: Files) -> None:
    made = new_token("shop", {"tenant": "a", "groups": ["x", "y"]})
    files.write(made, new_token("other"))
    authenticator = files.authenticator()

    proof = await authenticator.prove(bearer(made.token))
    principal = proof.made

    assert (principal.name, principal.method) == ("shop", "token")
    assert principal.attributes == {"tenant": "a", "groups": ["x", "y"]}
    assert authenticator.known(bearer(made.token)) == proof


def forms_of(token: str) -> dict[str, str]:
    head, _, secret = token.rpartition("_")
    return {
        "other secret": bearer(head + "_" + secret[:-1] + ("A" if secret[-1] != "A" else "B")),
        "other ID": bearer(token.replace("smq_", "smq_2")),
        "cut": bearer(token[:-1]),
        "basic": f"Basic {token}",
        "bare": token,
        "two": bearer(f"{token} {token}"),
        "empty": "Bearer ",
        "long": bearer("smq_abcdefgh_" + "A" * 20_000),
        "text": bearer("ä" * 30),
    }


@pytest.mark.parametrize("form", forms_of("smq_abcdefgh_" + "A" * 40))
async def test_a_forged_token_is_refused(files: Files, form: str) -> None:
    made = new_token("shop")
    files.write(made)
    authenticator = files.authenticator()
    await authenticator.prove(bearer(made.token))

    with pytest.raises(Unauthenticated):
        await authenticator.prove(forms_of(made.token)[form])


async def test_a_token_ends_when_it_expires(files: Files) -> None:
    made = new_token("shop", expires=datetime.fromtimestamp(files.now_s, UTC) + timedelta(hours=1))
    files.write(made)
    authenticator = files.authenticator()
    await authenticator.prove(bearer(made.token))

    files.now_s += 3601

    assert authenticator.known(bearer(made.token)) is None
    with pytest.raises(Unauthenticated, match="expired"):
        await authenticator.prove(bearer(made.token))


async def test_a_token_that_is_removed_from_the_file_is_refused(files: Files) -> None:
    old, new = new_token("shop"), new_token("shop")
    files.write(old)
    authenticator = files.authenticator()
    await authenticator.prove(bearer(old.token))

    files.write(new)
    assert files.reloaded is not None
    assert files.reloaded.reload()
    authenticator.forget()

    assert (await authenticator.prove(bearer(new.token))).made.name == "shop"
    with pytest.raises(Unauthenticated, match="wrong or was removed: ask"):
        await authenticator.prove(bearer(old.token))


async def test_a_token_that_is_removed_while_it_is_checked_is_not_remembered(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_token("shop")
    files.write(made)
    authenticator = files.authenticator()
    checking, go_on = threading.Event(), threading.Event()
    matches = TokenEntry.matches

    def slow(self: TokenEntry, token: str) -> bool:
        checking.set()
        assert go_on.wait(60)
        return matches(self, token)

    monkeypatch.setattr(TokenEntry, "matches", slow)
    check = asyncio.create_task(authenticator.prove(bearer(made.token)))
    await asyncio.to_thread(checking.wait, 60)
    authenticator.forget()
    go_on.set()
    await check

    assert authenticator.known(bearer(made.token)) is None


@pytest.mark.parametrize("text", ["tokens:\n", "tokens: []\n", "tokens:\n  # none left\n"])
async def test_the_last_token_is_refused_once_its_lines_are_removed(
    files: Files, text: str
) -> None:
    made = new_token("shop")
    files.write(made)
    authenticator = files.authenticator()
    await authenticator.prove(bearer(made.token))

    files.tokens.write_text(text)
    assert files.reloaded is not None
    assert files.reloaded.reload()
    authenticator.forget()

    with pytest.raises(Unauthenticated, match="wrong or was removed"):
        await authenticator.prove(bearer(made.token))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hash": "plain:secret"}, "tokens[0].hash"),
        ({"hash": "scrypt:16384:8:1::"}, "tokens[0].hash"),
        ({"hash": "scrypt:2:8:1:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"hash": "scrypt:99999999:8:1:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"hash": "scrypt:16384:8:999999:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"hash": "scrypt:16384:8:9:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"hash": "scrypt:16384:-8:-1:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"hash": "scrypt:16384:-8:1:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"hash": f"scrypt:16384:8:{10**23}:" + "A" * 22 + ":" + "A" * 43}, "tokens[0].hash"),
        ({"id": "UPPER"}, "tokens[0].id"),
        ({"principal": ""}, "tokens[0].principal"),
        ({"secret": "x"}, "tokens[0]"),
        ({"expires": "soon"}, "tokens[0].expires"),
        ({"expires": "2027-01-01T00:00:00"}, "tokens[0].expires"),
    ],
)
def test_a_bad_entry_is_refused_with_its_key(change: dict[str, Any], field: str) -> None:
    text = yaml.safe_dump({"tokens": [new_token("shop").entry | change]})

    with pytest.raises(InvalidArgument) as caught:
        TokenFile(Document("tokens.yaml", text))

    assert caught.value.field == field
    assert "tokens.yaml" in caught.value.description


def test_tokens_of_the_same_parameters_are_loaded_at_the_price_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [new_token("shop").entry for _ in range(3)]
    tried = Counter[tuple[int, int, int]]()

    def counted(token: str, salt: bytes, parameters: tuple[int, int, int]) -> bytes:
        tried[parameters] += 1
        return hash_token(token, salt, parameters)

    monkeypatch.setattr(token_file, "hash_token", counted)
    token_file._try_out.cache_clear()
    loaded = TokenFile(Document("tokens.yaml", yaml.safe_dump({"tokens": entries})))

    assert (len(loaded), list(tried.values())) == (3, [1])


def test_a_file_has_no_secret_and_no_two_tokens_are_alike() -> None:
    first, second = new_token("shop"), new_token("shop")
    secret = first.token.split("_", 2)[2]

    assert secret not in yaml.safe_dump(first.entry)
    assert first.entry["id"] != second.entry["id"]
    assert first.entry["hash"].split(":")[4:] != second.entry["hash"].split(":")[4:]


def test_a_bad_new_version_leaves_the_one_before(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    made = new_token("shop")
    files.write(made)
    reloaded = ReloadedFile.of_document(files.tokens, TokenFile)

    files.tokens.write_text("tokens: [")

    assert not reloaded.reload()
    assert reloaded.value.get(made.entry["id"]) is not None
    assert "is not YAML" in caplog.text
    caplog.clear()
    assert not reloaded.reload()
    assert not caplog.text
    files.tokens.unlink()
    assert not reloaded.reload()
    files.write(made, new_token("other"))
    assert reloaded.reload()
    assert len(reloaded.value) == 2


def test_a_new_version_that_breaks_its_reader_is_logged_and_the_next_one_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "number"
    file.write_text("10")
    reloaded = ReloadedFile(file, lambda path: 100 // int(path.read_text()))

    file.write_text("0")

    assert not reloaded.reload()
    assert reloaded.value == 10
    assert "ZeroDivisionError" in caplog.text
    file.write_text("100")
    assert reloaded.reload()
    assert reloaded.value == 1


async def test_files_and_tokens_are_looked_at_while_other_threads_are_busy(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "LOOK_S", 0)
    made, removed = new_token("shop"), new_token("removed")
    files.write(made, removed)
    authenticator = files.authenticator()
    released = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(released.wait))
    taken: list[tuple[Path, int]] = []
    watching = asyncio.create_task(authenticator.watch_files(lambda *file: taken.append(file)))
    try:
        async with asyncio.timeout(60):
            await authenticator.prove(bearer(removed.token))
            files.write(made)
            while authenticator.files_version == 0:
                await asyncio.sleep(0.01)
            with pytest.raises(Unauthenticated):
                await authenticator.prove(bearer(removed.token))
            assert (await authenticator.prove(bearer(made.token))).made.name == "shop"
            assert {file for file, _ in taken} == {files.tokens}
    finally:
        watching.cancel()
        released.set()
        await busy
