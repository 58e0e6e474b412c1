"""Where a result comes from: the machine, the versions, the commit."""

import datetime
import re
import subprocess
from pathlib import Path
from typing import Any

import openmsa
import torch


def processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def commit() -> str:
    """Of the checkout that this file is in, with a `+` where its sources differ from it."""

    def git(*command: str) -> str:
        where = str(Path(__file__).resolve().parent)
        result = subprocess.run(["git", "-C", where, *command], capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ":/examples", ":/python", ":/src", ":/include")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def serving_backend(device: str, operations: set[str]) -> dict[str, Any] | None:
    """The first available backend for the device ("cpu" or "gpu") that has all the operations."""
    for backend in openmsa.info()["backends"]:
        if backend["device"] == device and backend["available"] and operations <= set(backend["operations"]):
            found: dict[str, Any] = backend
            return found
    return None


def facts() -> dict[str, Any]:
    available = [backend for backend in openmsa.info()["backends"] if backend["available"]]
    return {
        "processor": processor_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "openmsa": openmsa.__version__,
        "backends": {backend["name"]: backend.get("target", True) for backend in available},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
