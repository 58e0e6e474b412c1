"""Files that are whole or not there, and the state of a run that continues where it stopped."""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.pt"
VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued from; the message says why."""


def write_whole(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`. Whatever happens, power loss included, it holds either the old or the new content.

    Raises OSError where it cannot be written; `path` is then as it was.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(folder: Path, state: Mapping[str, Any]) -> None:
    # torch.save into a file hides what the system said when it fails.
    content = io.BytesIO()
    torch.save({"version": VERSION, **state}, content)
    write_whole(folder / NAME, content.getvalue())


def load(folder: Path) -> dict[str, Any] | None:
    """The state in `folder`, None where there is none yet. Runs no code that a file might bring."""
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        version = state["version"]
    except Exception as error:  # torch raises many kinds for a file that is not one of its own
        raise CheckpointError(f"{path} is not a checkpoint of this program ({type(error).__name__})") from error
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version}, expected {VERSION}")
    restored: dict[str, Any] = state
    return restored
