"""Feast's registry in a file that is replaced in one step: a reader meanwhile sees all of it.

Feast's own store empties the file and then writes it. The stream, `reco forget` and the publication of
features open one registry, and read it again as soon as another has written it.
"""

from __future__ import annotations

from feast.infra.registry.file import FileRegistryStore
from feast.protos.feast.core.Registry_pb2 import Registry
from feast.repo_config import RegistryConfig
from google.protobuf.message import DecodeError

from feature_repo.atomic_files import replaced


class WholeFileRegistryStore(FileRegistryStore):
    """Writes beside the file, then renames. Feast finds this class by its name."""

    def get_registry_proto(self) -> Registry:
        """Return the registry; a damaged one counts as missing: `open_feature_store` writes it again."""
        try:
            return super().get_registry_proto()
        except DecodeError as error:
            raise FileNotFoundError(f"{self._filepath} is no registry: it is made again") from error

    def _write_registry(self, registry_proto: Registry) -> None:
        with replaced(self._filepath) as part:
            FileRegistryStore(RegistryConfig(path=str(part)), part.parent)._write_registry(registry_proto)
