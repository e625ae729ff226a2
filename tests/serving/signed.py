"""Keys and sealed folders for the tests of signatures."""

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serving.release.bundle import REQUIRED, RankingSettings, seal_bundle
from serving.stages.retrieval import Quotas


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Return a private key, and its public one in the folder `trusted`."""
    private = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    files = folder / f"{name}.key", folder / "trusted" / f"{name}.pem"
    files[1].parent.mkdir(exist_ok=True)
    files[0].write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    files[1].write_bytes(public)
    return files


def sealed(bundle: Path, **made_from: Any) -> Path:
    """Return a folder with a manifest, whose other files hold their names."""
    (bundle / "statistics").mkdir(parents=True)
    for name in (*REQUIRED, "statistics/price.npy"):
        (bundle / name).write_text(name)
    settings = RankingSettings(Quotas(), type_penalty=0.95)
    seal_bundle(bundle, cut="2017-11-27T05:00:00Z", settings=settings, made_from=made_from)
    return bundle
