"""Without torch only the tests that need none are collected."""

import importlib.util

HAVE_TORCH = importlib.util.find_spec("torch") is not None

collect_ignore = (
    []
    if HAVE_TORCH
    else [
        "problems.py", "test_autograd.py", "test_compile.py", "test_cuda.py", "test_errors.py", "test_operators.py",
        "test_torch.py",
    ]  # fmt: skip
)
