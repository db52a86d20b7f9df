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


def test_an_attribute_may_be_a_list_of_one(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.yaml", tmp_path / "shop"
    facts = ("--attribute", "groups+=eu", "--attribute", "tenant=a")

    assert make("shop", *facts, "--add-to", tokens, "--out", out) == 0

    entry = TokenFile(Document.read(tokens)).get(token_id(out.read_text().strip()))
    assert entry is not None
    assert entry.principal.attributes == {"groups": ["eu"], "tenant": "a"}


@pytest.mark.parametrize(
    "words",
    [
        ["--attribute", "note=a\udcff"],
        ["--attribute", "no\udcffte=a"],
        ["--attribute", f"{'x' * 256}=a"],
        ["--attribute", f"{chr(0x200B) * 171}=a"],
        [word for number in range(65) for word in ("--attribute", f"k{number}=a")],
        ["--expires", "0s"],
    ],
    ids=["half", "half in name", "long name", "long with escapes", "too many", "expired"],
)
def test_what_the_services_would_refuse_is_not_added(tmp_path: Path, words: list[str]) -> None:
    tokens, out = tmp_path / "tokens.yaml", tmp_path / "shop"

    assert make("shop", *words, "--add-to", tokens, "--out", out) == 2

    assert not tokens.exists()
    assert not out.exists()


def test_attributes_may_have_any_character(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.yaml", tmp_path / "shop"
    text = 'ä\xa0\u200b\x7f\x85\x80\u2028\ufeff\ufffe\n\t\\"\U000e0001\U0001f600'
    words = ["--attribute", f"{text}={text}", "--attribute", f"list+={text}"]
    longest = chr(0x200B) * 170

    assert (
        make("shop", *words, "--attribute", f"{longest}=a", "--add-to", tokens, "--out", out) == 0
    )

    entry = TokenFile(Document.read(tokens)).get(token_id(out.read_text().strip()))
    assert entry is not None
    assert entry.principal.attributes == {text: text, "list": [text], longest: "a"}


def test_as_many_attributes_as_the_services_take_are_added(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.yaml", tmp_path / "shop"
    facts = {f"{number}".rjust(255, "ü"): "ä \U0001f600" for number in range(64)}
    words = [word for fact in facts.items() for word in ("--attribute", "=".join(fact))]

    assert make("shop", *words, "--add-to", tokens, "--out", out) == 0

    entry = TokenFile(Document.read(tokens)).get(token_id(out.read_text().strip()))
    assert entry is not None
    assert entry.principal.attributes == facts


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

    said = capfd.readouterr().err
    assert f"{tmp_path / 'shop'} exists already: name another file, or remove it first" in said
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
