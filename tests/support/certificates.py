"""Certificates for tests, by authorities that live as long as a test."""

from __future__ import annotations

from pathlib import Path

import trustme

from rpc.options import TlsOptions

__all__ = ["Authority"]


class Authority:
    """Signs workers' certificates, which it leaves in a folder."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        self._folder = folder
        self._name = name
        self._authority = trustme.CA()
        self.certificate = str(folder / f"{name}.ca.pem")
        self._authority.cert_pem.write_to_path(self.certificate)

    def issue(self, *, ca: str | None = None, host: str = "worker.test") -> TlsOptions:
        """A certificate with its key, for who trusts ``ca``; default: this authority."""
        issued = self._authority.issue_cert(host)
        cert, key = (str(self._folder / f"{self._name}.{what}.pem") for what in ("cert", "key"))
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return TlsOptions(cert, key, ca or self.certificate)
