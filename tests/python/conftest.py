"""Without torch only the tests that need none are collected; OPENMSA_TEST_NO_TORCH does so where there is one."""

import importlib.util
import os

HAVE_TORCH = importlib.util.find_spec("torch") is not None and not os.environ.get("OPENMSA_TEST_NO_TORCH")

NEEDS_TORCH = (
    "autograd bench_cpu compat compile cuda docs errors nn nn_cache nn_training nn_weights operators threads torch"
)

collect_ignore = [] if HAVE_TORCH else [f"test_{name}.py" for name in NEEDS_TORCH.split()]
collect_ignore_glob = [] if HAVE_TORCH else ["test_train_lm_*.py", "test_transformers*.py"]
