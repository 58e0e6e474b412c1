"""What the tests of examples/train_lm.py share: its parts, and runs small enough to test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the sources came without examples/", allow_module_level=True)
sys.path.append(str(EXAMPLES))

import train_lm  # noqa: E402, F401
from lm import config, run  # noqa: E402
from lm.config import Config  # noqa: E402
from lm.model import ByteModel  # noqa: E402

SMALL = Config(context=256, block=32, topk=2)
ARGUMENTS = ["--context", "256", "--block", "32", "--topk", "2", "--scale", "0.012"]  # 4, 2, 2 and 2 steps


def small_model(seed: int = 0) -> ByteModel:
    torch.manual_seed(seed)
    return ByteModel(SMALL)


def write_text(folder: Path, files: int = 20, size: int = 4000) -> Path:
    """A folder of files that nothing else has in common with another: each repeats a line of its own."""
    folder.mkdir()
    for number in range(files):
        line = f"file {number:02d} says {number * 7919 % 997:03d}.\n".encode()
        (folder / f"{number:02d}.txt").write_bytes((line * (size // len(line) + 1))[:size])
    return folder


def make_runs_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "STEP_TOKENS", 256)
    monkeypatch.setattr(run, "WINDOWS", 1)
