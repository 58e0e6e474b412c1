"""scripts/gpu and the gate of CUDA compilations: what they refuse and count, how a bundle stays small. Needs no GPU."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "scripts" / "gpu"

pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="the sources came without scripts/")


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_command", str(COMMAND))
    spec = importlib.util.spec_from_loader("gpu_command", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_command"] = module  # dataclasses look it up
    loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COMMAND), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite>
  <testcase name="a" status="run" result="completed" classname="S"/>
  <testcase name="b" status="run" result="completed" classname="S"/>
  <testcase name="c" status="run" result="skipped" classname="S"/>
  {failed}
</testsuite></testsuites>
"""
FAILED_TEST = '<testcase name="d" status="run" result="completed" classname="S"><failure message="no"/></testcase>'


def make_bundle(folder: Path, programs: dict[str, str]) -> Path:
    """A bundle whose test programs are shell scripts; they find $report, the file that the results go to."""
    bundle = folder / "bundle"
    (bundle / "bin").mkdir(parents=True)
    built = {"commit": "0123abc", "modified": False, "packed": "2000-01-01T00:00:00Z"}
    (bundle / "commit.json").write_text(json.dumps(built))
    for name, text in programs.items():
        program = bundle / "bin" / name
        find_report = 'for word in "$@"; do case $word in --gtest_output=xml:*) report=${word#*xml:} ;; esac; done'
        program.write_text(f"#!/bin/sh\n{find_report}\n{text}\n")
        program.chmod(0o755)
    return bundle


def writes(report: str) -> str:
    return f"cat >\"$report\" <<'END'\n{report}\nEND\n"


def test_results_are_counted_and_kept(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, {"sm90_test": "echo one line; " + writes(REPORT.format(failed=""))})
    result = run("run", "--bundle", str(bundle), "--out", str(tmp_path / "out"), "sm90_test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "total: 2 passed, 0 failed, 1 skipped" in result.stdout
    assert "commit: 0123abc" in result.stdout
    assert "one line" in result.stdout
    assert (tmp_path / "out" / "h200.log").read_text() == result.stdout


def test_a_failed_test_fails_the_run(tmp_path: Path) -> None:
    programs = {"sm90_test": writes(REPORT.format(failed=FAILED_TEST)) + "exit 1", "case_test": "exit 0"}
    bundle = make_bundle(tmp_path, programs)
    result = run("run", "--bundle", str(bundle), "--out", str(tmp_path), "sm90_test", "case_test")
    assert result.returncode == 1
    assert re.search(r"FAILED +sm90_test +2 passed +1 failed +1 skipped", result.stdout), result.stdout


@pytest.mark.parametrize("end", ["kill -SEGV $$", "exit 3"])
def test_a_crash_after_passing_tests_is_a_failure(tmp_path: Path, end: str) -> None:
    bundle = make_bundle(tmp_path, {"sm90_test": writes(REPORT.format(failed="")) + end})
    result = run("run", "--bundle", str(bundle), "--out", str(tmp_path), "sm90_test")
    assert result.returncode == 1
    assert "total: 2 passed, 1 failed, 1 skipped" in result.stdout


def test_a_step_ends_at_its_limit(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, {"sm90_test": "sleep 50 & sleep 50"})
    result = run("run", "--bundle", str(bundle), "--out", str(tmp_path), "--limit", "1", "sm90_test")
    assert result.returncode == 1
    assert "ended at its limit of 1 s" in result.stdout


def test_results_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, {"sm90_test": "exit 1"})
    (tmp_path / "sm90_test.xml").write_text(REPORT.format(failed=""))
    result = run("run", "--bundle", str(bundle), "--out", str(tmp_path), "sm90_test")
    assert "total: 0 passed, 1 failed, 0 skipped" in result.stdout


def test_words_of_names_select_steps(tmp_path: Path) -> None:
    gpu = load()
    steps = gpu.steps_of(tmp_path, tmp_path, False)
    benches = ["bench stage_select", "bench stage_attend", "bench prefill", "bench prefill_official"]
    assert [step.name for step in gpu.select_steps(steps, ["bench"])] == benches
    assert [step.name for step in gpu.select_steps(steps, [])] == [
        step.name for step in steps if step.name not in benches
    ]
    assert [step.name for step in gpu.select_steps(steps, ["python others", "sm90_test"])] == [
        "sm90_test",
        "python others",
    ]
    sanitizers = gpu.steps_of(tmp_path, tmp_path, True)
    assert len(gpu.select_steps(sanitizers, ["memcheck"])) == len(sanitizers) / 2


def test_all_steps_together_stay_below_ten_minutes(tmp_path: Path) -> None:
    gpu = load()
    for sanitize in (False, True):
        steps = gpu.select_steps(gpu.steps_of(tmp_path, tmp_path, sanitize), [])
        assert sum(step.limit for step in steps) < 600
    assert sum(step.limit for step in gpu.cpu_steps(tmp_path, tmp_path)) < 600


def test_the_cpu_backend_runs_on_every_instruction_set(tmp_path: Path) -> None:
    program = 'echo "$OPENMSA_TEST_BACKENDS on $OPENMSA_CPU_TARGET"; ' + writes(REPORT.format(failed=""))
    bundle = make_bundle(tmp_path, {"cpu_test": program, "case_test": program})
    result = run("run", "--cpu", "--bundle", str(bundle), "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    steps = load().cpu_steps(tmp_path, tmp_path)
    assert f"total: {2 * len(steps)} passed, 0 failed, {len(steps)} skipped" in result.stdout
    assert result.stdout.count("cpu on avx2") == 2


def test_arguments_go_to_the_step_that_is_named(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, {"sm90_test": 'echo "got $*"; ' + writes(REPORT.format(failed=""))})
    common = ("run", "--bundle", str(bundle), "--out", str(tmp_path))
    result = run(*common, "sm90_test", "--", "--gtest_filter=*.Repeats", "--more")
    assert result.returncode == 0, result.stderr
    assert re.search(r"got .*--gtest_filter=\*\.Repeats --more", result.stdout)
    result = run(*common, "--", "--more")
    assert result.returncode == 2
    assert "'--more': arguments go to one step" in result.stderr


def test_bad_usage(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, {})
    for arguments, part in (
        (["run", "--bundle", str(tmp_path / "none")], "is no bundle"),
        (["run", "--bundle", str(bundle), "--out", str(tmp_path), "other"], "unknown step 'other'"),
        (["run", "--bundle", str(bundle), "--limit", "0"], "--limit: got 0"),
        ([], "required"),
    ):
        result = run(*arguments)
        assert result.returncode == 2, arguments
        assert part in result.stderr


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path) -> None:
    gpu = load()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "small").write_bytes(b"x")
    assert gpu.check_size(tmp_path) == 1
    with (tmp_path / "lib" / "large").open("wb") as file:
        file.truncate(gpu.BUNDLE_LIMIT)
    with pytest.raises(gpu.Failure, match=r"lib/large 40\.0"):
        gpu.check_size(tmp_path)


def test_the_bundle_of_this_checkout_is_small() -> None:
    if not (ROOT / ".bundle").is_dir():
        pytest.skip("no .bundle/ here; `scripts/gpu pack` makes one")
    gpu = load()
    assert gpu.folder_size(ROOT / ".bundle") < gpu.BUNDLE_LIMIT


@pytest.mark.parametrize(
    ("report", "status"),
    [
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0),
        ("    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 1),
        ("    0 bytes stack frame, 120 bytes spill stores, 0 bytes spill loads", 1),
        ("    0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads", 1),
        ("ptxas info : (C7508) setmaxnreg ignored", 1),
        ("ptxas info : (C7510) Potential Performance Loss", 1),
        ("ptxas info : (C7520) Potential Performance Loss", 1),
    ],
)
def test_the_compile_gate_reads_the_assembler(report: str, status: int) -> None:
    gate = ROOT / "src" / "cuda" / "compile_gate.sh"
    result = subprocess.run(["sh", str(gate), "echo", report], capture_output=True, text=True, check=False)
    assert result.returncode == status
    assert report in result.stdout


def test_the_compile_gate_keeps_the_compilers_status() -> None:
    gate = ROOT / "src" / "cuda" / "compile_gate.sh"
    result = subprocess.run(["sh", str(gate), "sh", "-c", "exit 7"], capture_output=True, text=True, check=False)
    assert result.returncode == 7
