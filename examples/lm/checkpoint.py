"""Files that are whole or not there, and the state of a run that continues where it stopped."""

import contextlib
import fcntl
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.pt"
VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued from; the message says why."""


class InUseError(ValueError):
    """Another run writes into the folder; the message names it."""


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turns what goes wrong with the content of the folder's checkpoint into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder / NAME} does not hold the state of a run ({type(error).__name__}: {said})"
        ) from error


def lock(folder: Path) -> int:
    """Keeps other runs out of `folder` until the returned descriptor is closed, at the latest when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InUseError(f"--out: another run is writing into {folder}") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


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
