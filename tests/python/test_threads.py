"""The core follows torch's thread count, call by call and thread by thread."""

import os
import subprocess
import sys
import threading

import numpy as np
import openmsa
import pytest
import torch
from openmsa._library import binding


def select() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    index_q = torch.randn(600, 2, 64, generator=generator)
    index_k = torch.randn(600, 1, 64, generator=generator)
    return openmsa.select_blocks(index_q, index_k, topk=3, block_size=32)


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_follows_torch():
    results = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        results.append(select())
        assert binding.num_threads() == threads
    assert all(torch.equal(result, results[0]) for result in results)


def test_numpy_arrays_follow_torch_too():
    torch.set_num_threads(3)
    rows = np.ones((4, 1, 8), np.float32)
    openmsa.select_blocks(rows, rows)
    assert binding.num_threads() == 3


def test_each_thread_is_told():
    torch.set_num_threads(2)
    select()
    told = []

    def work() -> None:
        before = binding.num_threads()
        select()
        told.extend((before, binding.num_threads(), torch.get_num_threads()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told[0] == 0
    assert told[1] == told[2]


def test_compiled_calls_follow_torch():
    torch.set_num_threads(2)
    rows = torch.ones(4, 1, 8)
    call = torch.compile(lambda x: openmsa.select_blocks(x, x), backend="aot_eager", fullgraph=True)
    call(rows)
    torch.set_num_threads(1)
    call(rows)
    assert binding.num_threads() == 1


# In a process of its own: an OpenMP runtime keeps the threads that it started.
@pytest.mark.parametrize("threads", [1, 2])
def test_starts_as_many_threads_as_torch_allows(threads):
    script = f"""
import os, torch
torch.set_num_threads({threads})
import test_threads
before = set(os.listdir("/proc/self/task"))
test_threads.select()
print(len(set(os.listdir("/proc/self/task")) - before))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == threads - 1
