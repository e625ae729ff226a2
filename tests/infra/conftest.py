"""The manifests as kustomize writes them."""

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.infra.policies import Documents

KSERVE = Path(__file__).parents[2] / "infra" / "kserve"
Rendered = Callable[[str], Documents]


@pytest.fixture(scope="session")
def rendered() -> Rendered:
    """The documents of a folder of infra/kserve, as `kubectl apply -k` would send them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    seen: dict[str, Documents] = {}

    def render(folder: str) -> Documents:
        if folder not in seen:
            command = ["kubectl", "kustomize", str(KSERVE / folder)]
            text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
            seen[folder] = list(yaml.safe_load_all(text))
        return copy.deepcopy(seen[folder])

    return render


@pytest.fixture
def production(rendered: Rendered) -> Documents:
    return rendered("overlays/production")
