"""Without torch only the tests that need none are collected."""

import importlib.util

HAVE_TORCH = importlib.util.find_spec("torch") is not None

NEEDS_TORCH = "autograd compile cuda errors operators torch"

collect_ignore = [] if HAVE_TORCH else [f"test_{name}.py" for name in NEEDS_TORCH.split()]
