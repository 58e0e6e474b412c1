"""The example's runs: stopping, going on with the same bits, disks that are full, arguments that are wrong."""

from __future__ import annotations

import csv
import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import train_lm_example as example
from lm import checkpoint, picture
from lm.interrupt import Interrupt
from lm.progress import Progress

STEPS = 4 + 2 + 2 + 2


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example.write_text(tmp_path_factory.mktemp("text") / "files")


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example.make_runs_small(monkeypatch)
    monkeypatch.setattr(picture, "draw", lambda *_: False)  # it takes longest


def interrupted_at(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """The process gets the signal of Ctrl-C at the end of the step of this number."""
    step = Progress.step

    def stepping(self: Progress, stage: str, seconds: float) -> None:
        step(self, stage, seconds)
        if sum(self.done.values()) == steps:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "step", stepping)


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves but its times."""
    results = json.loads((out / "results.json").read_text())
    kept = ("settings", "quality", "index", "index_untrained", "continuation", "missed")
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = {"seconds", "tokens_per_second"}
    return {
        "results": {name: results[name] for name in kept},
        "rows": [{name: value for name, value in row.items() if name not in timed} for row in rows],
        "model": (out / "model.safetensors").read_bytes(),
        "control": (out / "control.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        example.make_runs_small(patch)
        assert example.train_lm.main([*example.ARGUMENTS, "--text", str(text), "--out", str(out)]) == 0
    return out


def test_the_picture_is_there_and_small(finished: Path) -> None:
    pytest.importorskip("matplotlib")
    content = (finished / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 300_000


# In each stage, at the ends of the warm-up (where the control is born) and of the sparse one, and in the last step.
@pytest.mark.parametrize("steps", [1, 5, 6, 8, STEPS])
def test_a_stopped_run_goes_on_with_the_same_bits(
    steps: int, text: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*example.ARGUMENTS, "--text", str(text), "--out", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        interrupted_at(patch, steps)
        assert example.train_lm.main(arguments) == 130
    assert f"continue with: train_lm.py --out {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()
    assert example.train_lm.main(["--out", str(tmp_path)]) == 0
    assert outcome(tmp_path) == outcome(finished)


def test_a_finished_run_is_measured_again(finished: Path, tmp_path: Path) -> None:
    out, saved = tmp_path / "copy", tmp_path / "activations"
    shutil.copytree(finished, out)
    (out / "results.json").unlink()
    assert example.train_lm.main(["--resume", "--out", str(out), "--save-activations", str(saved)]) == 0
    assert outcome(out) == outcome(finished)
    assert sorted(path.name for path in saved.iterdir()) == ["layer0.safetensors", "layer1.safetensors"]


def test_saved_weights_are_those_of_the_models(finished: Path) -> None:
    state = checkpoint.load(finished)
    assert state is not None
    for path, name in (("model.safetensors", "sparse"), ("control.safetensors", "dense control")):
        weights = safetensors.torch.load_file(finished / path)
        assert weights.keys() == state["trainers"][name]["model"].keys()
        assert all(torch.equal(weights[key], value) for key, value in state["trainers"][name]["model"].items())


def test_resume_takes_the_newest_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert example.train_lm.main(["--resume"]) == 2
    assert "no run to go on with" in capsys.readouterr().err
    for name, when in (("train_lm-1", 2000), ("train_lm-2", 1000)):
        with pytest.MonkeyPatch.context() as patch:
            interrupted_at(patch, 2)
            assert example.train_lm.main([*example.ARGUMENTS, "--text", str(text), "--out", f"runs/{name}"]) == 130
        os.utime(tmp_path / "runs" / name / checkpoint.NAME, (when, when))
    capsys.readouterr()
    interrupted_at(monkeypatch, 3)
    assert example.train_lm.main(["--resume"]) == 130
    assert "going on with runs/train_lm-1" in capsys.readouterr().out


def test_other_settings_or_text_are_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = example.write_text(tmp_path / "own")
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        interrupted_at(patch, 2)
        assert example.train_lm.main([*example.ARGUMENTS, "--text", str(own), "--out", str(out)]) == 130
    before = (out / checkpoint.NAME).read_bytes()
    for arguments, said in (
        (["--seed", "1"], "--seed: got 1"),
        (["--scale", "0.5"], "--scale: got 0.5"),
        (["--text", str(text)], "--text: got"),
    ):
        capsys.readouterr()
        assert example.train_lm.main(["--out", str(out), *arguments]) == 2
        assert said in capsys.readouterr().err
    (own / "00.txt").write_bytes(b"changed " * 500)
    assert example.train_lm.main(["--out", str(out)]) == 2
    assert "has changed since" in capsys.readouterr().err
    assert (out / checkpoint.NAME).read_bytes() == before


def test_a_process_that_is_told_to_end_keeps_its_state(text: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(example.EXAMPLES / "train_lm.py"),
        *example.ARGUMENTS,
        "--scale",
        "50",
        "--text",
        str(text),
    ]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "minutes to go" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this step" in said
    assert f"continue with: train_lm.py --out {tmp_path}" in said
    assert "Traceback" not in said
    state = checkpoint.load(tmp_path)
    assert state is not None
    assert state["position"]["step"] >= 1


def test_the_second_signal_ends_at_once() -> None:
    with Interrupt() as interrupt:
        interrupt.deferred = True
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_full_disk_keeps_the_last_state(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        writes = 0
        real = os.fsync

        def full(descriptor: int) -> None:
            nonlocal writes
            writes += 1
            if writes > 13:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        patch.setattr(os, "fsync", full)
        assert example.train_lm.main([*example.ARGUMENTS, "--text", str(text), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert f"continue with: train_lm.py --out {tmp_path}" in said
    assert not list(tmp_path.glob("*.new"))
    assert example.train_lm.main(["--out", str(tmp_path)]) == 0
    assert outcome(tmp_path) == outcome(finished)


def test_a_write_that_the_system_cuts_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write_whole(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write_whole(path, bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_files_that_are_no_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    checkpoint.save(whole, {"settings": {}})
    content = (whole / checkpoint.NAME).read_bytes()
    torch.save({"version": 1, "bomb": Bomb()}, tmp_path / "bomb.pt")
    torch.save({"version": 99}, tmp_path / "later.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    contents = [b"", b"text", content[: len(content) // 2], pickle.dumps(Bomb())]
    contents += [(tmp_path / f"{name}.pt").read_bytes() for name in ("bomb", "later", "list")]
    for number, hostile in enumerate(contents):
        out = tmp_path / str(number)
        out.mkdir()
        (out / checkpoint.NAME).write_bytes(hostile)
        assert example.train_lm.main(["--out", str(out)]) == 2, number
        said = capsys.readouterr().err
        assert checkpoint.NAME in said
        assert said.count("\n") == 1
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("settings",), None),
        (("settings", "context"), "2048"),
        (("settings", "what"), 1),
        (("settings", "block"), 48),
        (("settings", "context"), 2**40),
        (("trainers",), {}),
        (("trainers", "another"), {}),
        (("trainers", "sparse", "model"), {}),
        (("trainers", "sparse", "optimiser"), {}),
        (("position", "generator"), torch.zeros(3)),
        (("position", "what"), 1),
        (("progress",), {}),
        (("stage",), 99),
        (("stage",), "sparse"),
    ],
)
def test_checkpoints_of_other_contents(
    path: tuple[str, ...], value: Any, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state: Any = checkpoint.load(finished)
    place = state
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    checkpoint.save(tmp_path, state)
    assert example.train_lm.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith((f"train_lm: {tmp_path / checkpoint.NAME} does not hold", "train_lm: --block: got 48",
                            "train_lm: too little text"))  # fmt: skip


def test_a_folder_that_another_run_writes_into(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(finished / checkpoint.NAME, tmp_path)
    other = checkpoint.lock(tmp_path)
    assert example.train_lm.main(["--out", str(tmp_path)]) == 2
    assert "--out: another run is writing into" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]
    os.close(other)
    os.close(checkpoint.lock(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scale", "0"], "--scale: got 0"),
        (["--scale", "nan"], "--scale: got nan"),
        (["--scale", "inf"], "--scale: got inf"),
        (["--scale", "1e308"], "--scale: got 1e+308"),
        (["--topk", "1"], "--topk: got 1"),
        (["--context", "300"], "--context: got 300"),
        (["--context", "-1"], "--context: got -1"),
        (["--seed", "-1"], "--seed: got -1"),
        (["--scale", "0.1", "--check"], "--check: --scale 0.1"),
        (["--activations-length", "5000"], "--activations-length: needs"),
        (["--save-activations", "x", "--activations-length", "5"], "--activations-length: got 5"),
        (["--text", "/nowhere/to/be/found"], "No such file"),
        (["--text", "empty"], "no files in"),
        (["--text", "/dev/zero"], "neither a file nor a folder"),
        (["--device", "cuda"], "--device: got cuda"),
        (["--resume"], "--resume: no checkpoint.pt in"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert example.train_lm.main(["--out", "out", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train_lm: ")
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists(), "what cannot be followed leaves nothing behind"


@pytest.mark.parametrize("arguments", [["--block", "48"], ["--topk", "many"], ["--what"]])
def test_arguments_of_no_kind(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        example.train_lm.main(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert example.train_lm.main(["--out", str(tmp_path / "file")]) == 2
    assert "Not a directory" in capsys.readouterr().err
