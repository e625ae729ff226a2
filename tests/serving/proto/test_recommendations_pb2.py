"""The committed code is what protoc makes of the committed description."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GENERATED = ("recommendations_pb2.py", "recommendations_pb2.pyi", "recommendations_pb2_grpc.py")


@pytest.mark.parametrize("file", GENERATED)
def test_the_generated_code_is_up_to_date(file: str, tmp_path: Path) -> None:
    """If this fails: run the command in the docstring of `serving.proto`."""
    from grpc_tools import protoc

    well_known = Path(protoc.__file__).parent / "_proto"
    made = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{well_known}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            str(ROOT / "serving/proto/recommendations.proto"),
        ]
    )
    assert made == 0
    assert (tmp_path / "serving/proto" / file).read_text() == (ROOT / "serving/proto" / file).read_text()
