"""The wheel that the project builds installs into a fresh environment and works there without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import importlib.util, pathlib, sys
import numpy as np, openmsa
assert importlib.util.find_spec("torch") is None
assert pathlib.Path(openmsa.__file__).is_relative_to(sys.prefix)
x, y = np.random.default_rng(0).standard_normal((2, 300, 2, 16)).astype(np.float32)
result = openmsa.msa_attention(x, x, x, y, y, topk=2, block_size=64)
assert result.out.shape == x.shape and np.isfinite(result.out).all() and result.kl > 0
print(openmsa.__version__, openmsa.info()["version"])
"""


def run(*command: str | Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OPENMSA_LIBRARY_DIR", "PYTHONPATH")
    }
    result = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT,
        f"--config-settings=build-dir={tmp_path / 'build'}")  # fmt: skip
    (wheel,) = tmp_path.glob("openmsa-*.whl")
    tags = wheel.stem.split("-")[2:]
    assert tags[0] == "py3"
    assert tags[1] == "none"
    names = set(zipfile.ZipFile(wheel).namelist())
    libraries = {name for name in names if ".so" in name}
    assert libraries == {"openmsa/_lib/libopenmsa.so", "openmsa/_lib/libopenmsa_ffi.so"}
    assert "openmsa/py.typed" in names
    assert all(name.startswith(("openmsa/", "openmsa-")) for name in names)
    assert any(name.endswith(".data/scripts/openmsa") for name in names)

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel)
    first, second = run(python, "-c", SCRIPT).split()
    assert first == second
    # The command, with a library of its own.
    described = json.loads(run(tmp_path / "venv" / "bin" / "openmsa", "info", "--json"))
    assert described["version"] == first
