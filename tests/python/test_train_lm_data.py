"""The example's data: nothing held out is trained on, planted strings are as they say, bad text is one clear error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import train_lm_example as example
from lm import data
from lm.config import Config, Planting, schedule
from lm.data import TextError, draw_batch, load_corpus

PLAIN = torch.full((20000,), ord(" "), dtype=torch.uint8)  # planted characters are none of these


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def test_whole_files_are_held_out(tmp_path: Path) -> None:
    folder = example.write_text(tmp_path / "text", files=23)
    corpus = load_corpus(folder, 256)
    train, held_out = content(corpus.train), content(corpus.held_out)
    for number in range(23):
        text = (folder / f"{number:02d}.txt").read_bytes()
        marker = f"file {number:02d} says".encode()
        inside, outside = (held_out, train) if number % 10 == 9 else (train, held_out)
        assert text in inside
        assert marker not in outside
    assert (corpus.train_files, corpus.held_out_files) == (21, 2)


def test_order_is_that_of_names_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    folder = example.write_text(tmp_path / "text", files=3)
    (folder / "a").mkdir()
    (folder / "a" / "00.txt").write_bytes(b"deeper " * 500)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"hidden " * 500)
    corpus = load_corpus(folder, 32)
    assert content(corpus.train).startswith(b"file 00")
    assert content(corpus.held_out).startswith(b"deeper")
    assert b"hidden" not in content(corpus.train) + content(corpus.held_out)
    assert corpus.digest == load_corpus(folder, 32).digest


def test_copies_of_a_file_count_once(tmp_path: Path) -> None:
    folder = example.write_text(tmp_path / "text", files=10)
    (folder / "copy.txt").write_bytes((folder / "09.txt").read_bytes())  # of the one that is held out
    corpus = load_corpus(folder, 256)
    assert b"file 09" in content(corpus.held_out)
    assert b"file 09" not in content(corpus.train)


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 251)) * 200)
    corpus = load_corpus(path, 256)
    assert content(corpus.train) + content(corpus.held_out) == path.read_bytes()
    assert len(corpus.held_out) == 5000


def test_changed_text_has_another_digest(tmp_path: Path) -> None:
    folder = example.write_text(tmp_path / "text")
    before = load_corpus(folder, 256).digest
    (folder / "03.txt").write_bytes(b"other " * 600)
    assert load_corpus(folder, 256).digest != before


def test_reading_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_BYTES", 50_000)
    corpus = load_corpus(example.write_text(tmp_path / "text"), 256)
    assert len(corpus.train) + len(corpus.held_out) <= 50_000 + 20


def test_standard_library_is_enough_text() -> None:
    corpus = load_corpus(None, Config().context)
    assert len(corpus.held_out) > 200_000
    assert len(corpus.train) > 5 * len(corpus.held_out)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "No such file"),
        ("empty-folder", "no files in"),
        ("binary", "a binary or empty file"),
        ("empty", "a binary or empty file"),
        ("tiny", "too little text"),
        ("pipe", "neither a file nor a folder"),
        ("binaries", "no text in"),
    ],
)
def test_bad_text(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / name
    if name in ("empty-folder", "binaries"):
        path.mkdir()
    if name == "binaries":
        for number in range(3):
            (path / str(number)).write_bytes(b"\0\1" * 5000)
        os.mkfifo(path / "pipe")  # opening it would wait for ever
    elif name == "binary":
        path.write_bytes(b"\x7fELF\0" + b"text " * 5000)
    elif name == "empty":
        path.touch()
    elif name == "tiny":
        path.write_bytes(b"a few words")
    elif name == "pipe":
        os.mkfifo(path)
    with pytest.raises((TextError, OSError), match=said):
        load_corpus(path, 256)


@pytest.mark.parametrize("stage", schedule(Config(), 1.0) + schedule(example.SMALL, 1.0), ids=lambda stage: stage.name)
def test_planted_strings(stage: data.Planting) -> None:
    planting, context = stage.planting, stage.context
    batch = draw_batch(PLAIN, torch.Generator().manual_seed(4), 4, context, planting)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    rows, places = (batch.recall > 0).nonzero(as_tuple=True)
    assert len(rows) > 4 * context * planting.share * 0.2
    origin, recall = batch.origin[rows, places], batch.recall[rows, places]
    # A repeat's byte is that of its origin, out of the gap, and the origin's own loss counts nowhere.
    assert torch.equal(batch.targets[rows, places], batch.inputs[rows, origin])
    assert bool((places + 1 - origin > planting.gap).all())
    assert bool((batch.weights[rows, origin - 1][origin > 0] == 0).all())
    assert bool((batch.weights[rows, places] == (recall > data.UNKNOWABLE)).all())
    # Consecutive bytes of a repeat come from consecutive ones, and outside of strings the text is untouched.
    follows = recall > 1
    before = batch.origin[rows[follows], places[follows] - 1]
    inside = places[follows] > 0
    assert torch.equal(before[inside] + 1, origin[follows][inside])
    plain = (batch.weights == 1) & (batch.recall == 0)
    late_slots = batch.targets[plain] != ord(" ")
    assert not bool(late_slots.any())
    # Random strings: no two of a window are alike.
    strings = {(int(row), int(place) - int(part) + 1) for row, place, part in zip(rows, places, recall, strict=True)}
    heads = {
        (row, bytes(batch.targets[row, start : start + 8].tolist()))
        for row, start in strings
        if 0 <= start < context - 8
    }
    assert len(heads) >= len([start for _, start in strings if 0 <= start < context - 8])


def test_repeats_are_beyond_the_window_that_topk_blocks_reach() -> None:
    for config in (Config(), example.SMALL):
        assert config.planting.gap >= 2 * config.topk * config.block - config.block


def test_same_generator_same_windows() -> None:
    planting = Planting(share=0.4, gap=128, string=16)
    first, second = (draw_batch(PLAIN, torch.Generator().manual_seed(9), 2, 256, planting) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.recall, second.recall)
    other = draw_batch(PLAIN, torch.Generator().manual_seed(10), 2, 256, planting)
    assert not torch.equal(first.inputs, other.inputs)


def test_last_window_of_the_text_can_be_drawn() -> None:
    text = torch.arange(100, 100 + 65, dtype=torch.uint8)  # one window exactly
    batch = draw_batch(text, torch.Generator().manual_seed(0), 1, 64, Planting(share=0.0, gap=8, string=8))
    assert content(batch.inputs[0].byte()) + content(batch.targets[0, -1:].byte()) == content(text)
