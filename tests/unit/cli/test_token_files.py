"""`slatemq access token --add-to --out`: files of tokens, changed whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
from pathlib import Path

import pytest

from libs.access.token_file import TokenFile, token_id
from libs.documents import Document
from slatemq._tokens import new_token
from slatemq.cli.access.token_files import add_entry
from slatemq.cli.app import invoke

LISTS = {
    "none": None,
    "empty": "tokens:\n",
    "no end of the last line": "tokens:\n  # for now",
    "a comment before": "# whom we know\ntokens:\n",
}


def make(*words: str | Path) -> int:
    return invoke(["access", "token", *map(str, words)])


@pytest.mark.parametrize("text", LISTS.values(), ids=LISTS)
def test_the_services_know_what_was_added(tmp_path: Path, text: str | None) -> None:
    tokens = tmp_path / "tokens.yaml"
    if text is not None:
        tokens.write_text(text)

    for name in ("shop", "billing"):
        assert make(name, "--add-to", tokens, "--out", tmp_path / name) == 0

    known = TokenFile(Document.read(tokens))
    for name in ("shop", "billing"):
        token = (tmp_path / name).read_text().strip()
        entry = known.get(token_id(token))
        assert entry is not None
        assert entry.matches(token)
        assert entry.principal.name == name


def test_the_layout_of_a_list_is_kept(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    assert make("shop", "--add-to", tokens, "--out", tmp_path / "shop") == 0
    tokens.write_text(tokens.read_text().replace("\n  ", "\n"))
    tokens.chmod(0o640)

    assert make("billing", "--add-to", tokens, "--out", tmp_path / "billing") == 0

    assert len(TokenFile(Document.read(tokens))) == 2
    assert tokens.stat().st_mode & 0o777 == 0o640


def test_a_token_is_for_its_user_alone_and_printed_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert make("shop", "--out", tmp_path / "shop", "--json") == 0

    said = capfd.readouterr().out
    token = (tmp_path / "shop").read_text().strip()
    assert (tmp_path / "shop").stat().st_mode & 0o777 == 0o600
    assert json.loads(said)["token_file"] == str(tmp_path / "shop")
    assert token not in said


def test_nothing_is_written_where_links_in_its_folder_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, precious = tmp_path / "tokens.yaml", tmp_path / "precious"
    precious.write_text("precious")
    drawn = iter(["11", "22"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(drawn))
    for guessed in (str(os.getpid()), "11"):
        (tmp_path / f".tokens.yaml.{guessed}").symlink_to(precious)

    with pytest.raises(FileExistsError):
        add_entry(tokens, new_token("shop"))
    add_entry(tokens, new_token("shop"))

    assert precious.read_text() == "precious"
    assert len(TokenFile(Document.read(tokens))) == 1


@pytest.mark.parametrize("text", ["tokens: []\n", "- a\n", "tokens:\n  - a\nmore: 1\n", "{"])
def test_another_form_is_refused_and_nothing_is_changed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(text)

    assert make("shop", "--add-to", tokens, "--out", tmp_path / "shop") == 2

    assert "by hand" in capfd.readouterr().err
    assert tokens.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.yaml"]


def test_a_token_that_is_there_is_not_overwritten(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop").write_text("precious")

    assert make("shop", "--add-to", tmp_path / "tokens.yaml", "--out", tmp_path / "shop") == 2

    assert "File exists" in capfd.readouterr().err
    assert (tmp_path / "shop").read_text() == "precious"
    assert not (tmp_path / "tokens.yaml").exists()


def test_two_that_add_at_once_lose_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, sync = tmp_path / "tokens.yaml", os.fsync
    second = threading.Thread(target=add_entry, args=(tokens, new_token("second")))

    def another_comes(descriptor: int) -> None:
        """Between reading the file and replacing it."""
        monkeypatch.setattr(os, "fsync", sync)
        second.start()
        folder = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # It waits until this one is done
        else:
            second.join()
        finally:
            os.close(folder)

    monkeypatch.setattr(os, "fsync", another_comes)
    add_entry(tokens, new_token("first"))
    second.join()

    assert len(TokenFile(Document.read(tokens))) == 2
