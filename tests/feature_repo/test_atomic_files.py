"""A file is replaced as a whole or not at all, and no temporary file stays behind."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from feature_repo.atomic_files import is_damage, is_gone, read_json, replaced, write_file, write_output


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_content_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "new" / "state.json"
    write_file(file, "über")
    assert file.read_bytes() == "über".encode()
    write_file(file, b"\xff\n")
    assert file.read_bytes() == b"\xff\n"
    assert names(file.parent) == ["state.json"]


def test_a_named_place_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    os.mkfifo(pipe)
    came: list[str] = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "through")
    reader.join()
    assert (came, pipe.is_fifo()) == (["through"], True)
    write_output(tmp_path / "none", "made")
    assert names(tmp_path) == ["link", "none", "pipe", "target"]


def test_an_error_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_file(file, "old")

    def write(error: BaseException) -> None:
        with replaced(file) as part:
            part.write_text("new")
            raise error

    for error in (OSError("disk full"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            write(error)
        assert file.read_text() == "old"
        assert names(tmp_path) == ["state.json"]


def test_a_file_that_another_node_deleted_is_gone() -> None:
    assert is_gone(FileNotFoundError())
    assert is_gone(OSError(errno.ESTALE, "stale file handle"))
    assert not is_gone(OSError(errno.EIO, "input/output error"))


def test_only_what_a_file_holds_is_damage() -> None:
    assert is_damage(pa.ArrowInvalid("not a Parquet file"))
    assert is_damage(OSError("Arrow's, without a number"))
    assert is_damage(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a name"))
    assert not is_damage(OSError(errno.EIO, "input/output error"))
    assert not is_damage(pa.ArrowMemoryError("too little memory"))


def test_the_temporary_file_is_hidden_and_lies_beside(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    with replaced(file) as part:
        part.write_text("new")
        assert part.parent == tmp_path
        assert part.name.startswith(".graph.yaml.")
        assert part.name.endswith(".part")
        assert not file.exists()
    assert file.read_text() == "new"


def test_a_private_file_is_private_from_the_first_byte(tmp_path: Path) -> None:
    file = tmp_path / "up.json"
    file.write_text("old")
    for _ in range(2):
        with replaced(file, private=True) as part:
            assert part.stat().st_mode & 0o777 == 0o600
            part.write_text("secret")
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_durable_file_is_on_disk_before_it_is_renamed_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[tuple[bytes | Path, bool]]()
    file = tmp_path / "champion.json"

    def fsync(descriptor: int) -> None:
        is_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        synced.append((tmp_path if is_folder else os.pread(descriptor, 100, 0), file.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(file, "new", durable=True)
    assert synced == [(b"new", False), (tmp_path, True)]
    file.unlink()
    write_file(file, "newer")
    assert len(synced) == 2


def test_a_reader_sees_whole_files_only_while_two_write(tmp_path: Path) -> None:
    """The writers share a process, and so its number: their temporary files differ all the same."""
    file = tmp_path / "state.json"
    contents = [letter * 100_000 for letter in "ab"]
    write_file(file, contents[0])

    def write() -> None:
        for _ in range(100):
            for content in contents:
                write_file(file, content)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            assert file.read_text() in contents
        for writer in writers:
            writer.result()


@pytest.mark.parametrize("content", ["", "{", b"\xff", "[" * 100_000], ids=["empty", "cut", "bytes", "deep"])
def test_whatever_is_no_json_is_one_kind_of_error(content: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(content)
