"""Test how files are written, whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardwright.utils.file_io import write_atomically


def test_a_pipe_or_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    """`-o /dev/null`, as root, must not make a file of the device; nor must a link to it."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDWR)  # holds it open, so that a writer need not wait
    try:
        write_atomically(link, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink()
