"""Files of tokens and of issuers, for tests of what they prove."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from libs.access.authentication import Authenticator
from libs.access.jwt_tokens import issuers_file
from libs.access.principals import Principal
from libs.access.reloading import ReloadedFile
from libs.access.token_file import TokenFile
from slatemq._tokens import NewToken


class Files:
    """A file of tokens and one of issuers, as an Authenticator reads them."""

    def __init__(self, folder: Path) -> None:
        self.tokens = folder / "tokens.yaml"
        self.issuers = folder / "issuers.yaml"
        self.now_s = time.time()

    def write(self, *tokens: NewToken) -> None:
        self.tokens.write_text(yaml.safe_dump({"tokens": [token.entry for token in tokens]}))

    def authenticator(
        self, *, tokens: bool = True, issuers: bool = False
    ) -> Authenticator[Principal]:
        token_file = ReloadedFile.of_document(self.tokens, TokenFile) if tokens else None
        issuer_file = issuers_file(self.issuers) if issuers else None
        self.reloaded = token_file
        self.reloaded_issuers = issuer_file
        return Authenticator(token_file, issuer_file, lambda one: one, lambda: self.now_s)

    def reload_issuers(self) -> bool:
        assert self.reloaded_issuers is not None
        return self.reloaded_issuers.reload()


def bearer(token: str) -> str:
    return f"Bearer {token}"
