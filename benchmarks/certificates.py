"""Certificates for workers that are measured with TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["Certificate"]


class Certificate:
    """One for all workers of a group, by an authority of its own; made before they are forked."""

    def __init__(self) -> None:
        import trustme

        authority = trustme.CA()
        issued = authority.issue_cert("worker.bench")
        self._files = {
            "cert": issued.cert_chain_pems[0].bytes(),
            "key": issued.private_key_pem.bytes(),
            "ca": authority.cert_pem.bytes(),
        }

    def options(self, rpc: Any, folder: Path, rank: int) -> Any:
        """In a worker: the module's options, with the files in that folder."""
        paths = {name: folder / f"{name}-{rank}.pem" for name in self._files}
        for name, path in paths.items():
            path.write_bytes(self._files[name])
        return rpc.TlsOptions(**{name: str(path) for name, path in paths.items()})
