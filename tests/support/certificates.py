"""Certificates of a chain that exists in one test run only."""

from __future__ import annotations

from pathlib import Path

import attrs
import trustme

from skippy.stage.links import TlsFiles


@attrs.frozen
class Certificates:
    """PEM files: a CA, a stage's certificate of it with its key; and the same of another CA."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        for name in ("chain", "stranger"):
            ca = trustme.CA()
            leaf = ca.issue_cert("127.0.0.1", "127.0.0.2", "::1", "localhost")
            ca.cert_pem.write_to_path(folder / f"{name}-ca.pem")
            leaf.private_key_pem.write_to_path(folder / f"{name}-key.pem")
            with (folder / f"{name}.pem").open("wb") as file:
                file.writelines(blob.bytes() for blob in leaf.cert_chain_pems)
        return cls(folder)

    def files(self, cert: str | None = "chain", ca: str | None = "chain") -> TlsFiles:
        """The certificate of one CA, checking peers against another; None leaves out."""
        return TlsFiles(
            cert=cert and str(self.folder / f"{cert}.pem"),
            key=cert and str(self.folder / f"{cert}-key.pem"),
            ca=ca and str(self.folder / f"{ca}-ca.pem"),
        )
