"""Real text as bytes, with whole files held out, and windows of it with planted recall."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import Planting

HELD_OUT_EVERY = 10  # one file in ten is never trained on
MAX_BYTES = 256 << 20  # of text read into memory
ALPHABET = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))
FIRST_GRADED = 5  # a repeat can be known for sure from here on (1-based); its first bytes only start the match
UNKNOWABLE = 2  # bytes of a repeat that carry no loss, as nothing announces them


@dataclass(frozen=True)
class Corpus:
    train: torch.Tensor  # [bytes] uint8
    held_out: torch.Tensor
    train_files: int
    held_out_files: int
    source: str


@dataclass(frozen=True)
class Batch:
    inputs: torch.Tensor  # [batch, context] int64
    targets: torch.Tensor
    weights: torch.Tensor  # of each target's loss: 0 where nothing can be known
    recall: torch.Tensor  # 1-based place of the target in a repeated string, 0 elsewhere

    @property
    def graded(self) -> torch.Tensor:
        return self.recall >= FIRST_GRADED


def _standard_library() -> tuple[list[Path], str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests are not prose; encodings are near copies of one another, which would leak held-out files into training.
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "pydoc_data", "lib2to3"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    return sorted(files), f"the Python standard library in {root}"


def _text_files(text: Path) -> tuple[list[Path], str]:
    if text.is_dir():
        hidden = [path for path in text.rglob("*") if path.is_file()]
        files = [path for path in hidden if not any(part.startswith(".") for part in path.relative_to(text).parts)]
        return sorted(files), f"the files in {text}"
    return [text], f"the file {text}"


def load_corpus(text: Path | None, context: int) -> Corpus:
    """Reads `text` (a file or a folder), or by default the sources of Python's standard library."""
    paths, source = _standard_library() if text is None else _text_files(text)
    contents: list[bytes] = []
    total = 0
    for path in paths:
        content = path.read_bytes()
        if b"\0" in content or not content:
            continue  # not text
        total += len(content)
        if total > MAX_BYTES:
            break
        contents.append(content)
    if len(contents) == 1:  # one file: hold out its last tenth
        cut = len(contents[0]) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
        train, held_out = [contents[0][:cut]], [contents[0][cut:]]
    else:
        step = min(HELD_OUT_EVERY, max(2, len(contents)))
        train = [content for index, content in enumerate(contents) if index % step != step - 1]
        held_out = [content for index, content in enumerate(contents) if index % step == step - 1]
    corpus = Corpus(_join(train), _join(held_out), len(train), len(held_out), source)
    if min(len(corpus.train), len(corpus.held_out)) < 8 * (context + 1):
        raise ValueError(
            f"{source}: {len(corpus.train)} bytes to train on and {len(corpus.held_out)} held out; "
            f"each must have {8 * (context + 1)} for windows of {context} bytes"
        )
    return corpus


def _join(contents: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(contents)) or bytearray(1), dtype=torch.uint8)


def draw_batch(text: torch.Tensor, generator: torch.Generator, batch: int, context: int, planting: Planting) -> Batch:
    """Random windows of `text`; random strings are written over it, each again more than `planting.gap` bytes later."""

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    length, string = context + 1, planting.string
    tokens = torch.empty(batch, length, dtype=torch.long)
    weights = torch.ones(batch, length)
    recall = torch.zeros(batch, length, dtype=torch.long)
    slots = length // string
    apart = -(-planting.gap // string) + 1
    wanted = int(planting.share * context / (2 * string))
    for row in range(batch):
        start = random(0, len(text) - length)
        tokens[row] = text[start : start + length].long()
        free = [True] * slots
        placed = 0
        for _ in range(4 * wanted):
            if placed == wanted:
                break
            first = random(0, slots - apart)
            second = random(first + apart, slots)
            if not (free[first] and free[second]):
                continue
            free[first] = free[second] = False
            placed += 1
            late = random(0, 5)  # so that distances are no multiples of the slot
            value = ALPHABET[torch.randint(0, len(ALPHABET), (string,), generator=generator)]
            begin, end = second * string + late, (second + 1) * string
            tokens[row, first * string : (first + 1) * string] = value
            weights[row, first * string : (first + 1) * string] = 0
            tokens[row, begin:end] = value[: string - late]
            recall[row, begin:end] = torch.arange(1, string - late + 1)
            weights[row, begin : begin + UNKNOWABLE] = 0
    return Batch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:], recall[:, 1:])
