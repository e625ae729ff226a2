import pytest

from tests.programs import run_python


@pytest.mark.slow
def test_telemetry_is_off_before_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    program = """
import os, sys
class Look:
    def find_spec(self, name, *_):
        if name == "onnxruntime":
            print(os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Look())
import serving.release.bundle
"""
    assert run_python("-c", program) == "1\n"
