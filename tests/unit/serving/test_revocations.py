"""Files of revocation lists: what is taken, and what is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from libs.serving.access import protection_of
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import FatalError
from libs.serving.requests.auditing import Auditor
from libs.serving.revocations import revocations_of
from slatemq.cli.access.dev_certificates import Authority
from slatemq.errors import InvalidArgument, Unauthenticated

Builder = x509.CertificateRevocationListBuilder
PEM = serialization.Encoding.PEM


def builder_of(authority: Authority, *revoked: bytes, days: int = 1) -> Builder:
    now = datetime.now(UTC)
    builder = Builder().issuer_name(authority.name).last_update(now - timedelta(days=9))
    builder = builder.next_update(now + timedelta(days=days))
    for pem in revoked:
        serial = x509.load_pem_x509_certificate(pem).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(entry.build())
    return builder


def signed(authority: Authority, builder: Builder) -> bytes:
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(PEM)


class Files:
    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority(1, "ours"), Authority(1, "others")
        self.ca, self.lists = folder / "ca.crt", folder / "crl.pem"
        self.ca.write_bytes(self.authority.pem)
        own = {"tls_cert": folder / "service.crt", "tls_key": folder / "service.key"}
        self.tls: dict[str, Any] = {name: str(file) for name, file in own.items()}
        self.tls["tls_ca"] = str(self.ca)

    def certify(self) -> None:
        certificate, key = self.authority.sign("service", ("service",))
        Path(self.tls["tls_cert"]).write_bytes(certificate)
        Path(self.tls["tls_key"]).write_bytes(key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_what_a_list_names_is_refused_and_nothing_else(files: Files) -> None:
    files.ca.write_bytes(files.authority.pem + files.other.pem)
    mine, kept, theirs = [
        one.sign("client", ("client",))[0]
        for one in (files.authority, files.authority, files.other)
    ]
    files.lists.write_bytes(
        b"of two authorities\n"
        + signed(files.authority, builder_of(files.authority, mine))
        + signed(files.other, builder_of(files.other, theirs))
    )

    revoked = revocations_of(files.lists, files.ca).value

    for pem in (mine, theirs, mine):
        with pytest.raises(Unauthenticated) as caught:
            revoked.check({"x509_pem_cert": [pem]})
        assert caught.value.reason == "CERTIFICATE_REVOKED"
    revoked.check({"x509_pem_cert": [kept]})
    revoked.check({})


def test_a_number_that_another_authority_gave_too_is_not_revoked(files: Files) -> None:
    theirs = files.other.sign("client", ("client",))[0]
    number = x509.load_pem_x509_certificate(theirs).serial_number
    entry = x509.RevokedCertificateBuilder().serial_number(number)
    entry = entry.revocation_date(datetime.now(UTC))
    named = builder_of(files.authority).add_revoked_certificate(entry.build())
    files.lists.write_bytes(signed(files.authority, named))
    revoked = revocations_of(files.lists, files.ca).value

    revoked.check({"x509_pem_cert": [theirs]})


def test_what_an_authority_signed_that_was_revoked_itself_is_refused(files: Files) -> None:
    # gRPC has the leaf, and apart from it all that the client sent besides
    between = files.authority.sign("between", ("between",))[0]
    leaf = files.other.sign("client", ("client",))[0]
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority, between)))
    revoked = revocations_of(files.lists, files.ca).value

    with pytest.raises(Unauthenticated) as caught:
        revoked.check(
            {"x509_pem_cert": [leaf], "x509_pem_cert_chain": [files.authority.pem + between]}
        )
    assert caught.value.reason == "CERTIFICATE_REVOKED"
    revoked.check({"x509_pem_cert": [leaf], "x509_pem_cert_chain": [files.authority.pem]})
    with pytest.raises(Unauthenticated):
        revoked.check({"x509_pem_cert": [leaf], "x509_pem_cert_chain": [b"what is not read"]})


DELTA = x509.DeltaCRLIndicator(1)
INDIRECT = x509.IssuingDistributionPoint(
    full_name=None,
    relative_name=None,
    only_contains_user_certs=False,
    only_contains_ca_certs=False,
    only_some_reasons=None,
    indirect_crl=True,
    only_contains_attribute_certs=False,
)
"""It may name certificates of other authorities."""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda files: b"", "has no revocation list"),
        (lambda files: files.authority.pem, "has no revocation list"),
        (
            lambda files: signed(files.authority, builder_of(files.authority)).replace(b"M", b"?"),
            "is damaged",
        ),
        (lambda files: signed(files.other, builder_of(files.other)), "'CN=others'.*not signed by"),
        (lambda files: signed(files.other, builder_of(files.authority)), "'CN=ours'.*not signed"),
        (
            lambda files: signed(
                files.authority, builder_of(files.authority).add_extension(DELTA, critical=True)
            ),
            "not a complete list",
        ),
        (
            lambda files: signed(
                files.authority, builder_of(files.authority).add_extension(INDIRECT, critical=True)
            ),
            "not a complete list",
        ),
    ],
)
def test_a_file_that_is_no_list_of_our_authorities_stops_the_start(
    files: Files, content: Callable[[Files], bytes], problem: str
) -> None:
    files.lists.write_bytes(content(files))

    with pytest.raises(InvalidArgument, match=problem) as caught:
        revocations_of(files.lists, files.ca)
    assert caught.value.field == "tls_crl"


def test_a_file_that_is_not_there_or_has_no_authorities_beside_it_stops_the_start(
    files: Files,
) -> None:
    files.certify()
    for tls, problem in (
        (files.tls, f"--tls-crl: cannot read {files.lists}"),
        ({}, "--tls-crl: has no effect"),
    ):
        config = ServingConfig(root="memory:///", tls_crl=str(files.lists), **tls)
        with pytest.raises(FatalError, match=problem):
            protection_of(config, Auditor(lambda act: None))


def test_a_list_that_is_out_of_date_stays_in_force_and_is_warned_about(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    mine = files.authority.sign("client", ("client",))[0]
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority, mine, days=-1)))

    revoked = revocations_of(files.lists, files.ca).value

    assert "out of date" in caplog.text
    with pytest.raises(Unauthenticated):
        revoked.check({"x509_pem_cert": [mine]})


def test_a_list_counts_as_long_as_its_authority_is_trusted(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    mine = files.authority.sign("client", ("client",))[0]
    files.lists.write_bytes(signed(files.authority, builder_of(files.authority, mine)))
    file = revocations_of(files.lists, files.ca)

    files.ca.write_bytes(files.other.pem)

    assert not file.reload()
    assert "not signed by an authority" in caplog.text
    with pytest.raises(Unauthenticated):
        file.value.check({"x509_pem_cert": [mine]})
