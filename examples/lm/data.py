"""Real text as bytes, with whole files held out, and windows of it with planted recall."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import Planting

HELD_OUT_EVERY = 10  # one file in ten is never trained on
MAX_BYTES = 256 << 20  # of text read into memory
MIN_WINDOWS = 8  # of the context's size, in the training text and in the held-out one
ALPHABET = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))
FIRST_GRADED = 5  # a repeat can be known for sure from here on (1-based); its first bytes only start the match
UNKNOWABLE = 2  # bytes of a repeat that carry no loss, as nothing announces them
LATEST = 4  # a repeat starts up to so many bytes late in its slot, so that distances are no multiples of the slot


class TextError(ValueError):
    """Text that nothing can be trained on; the message says what it is."""


@dataclass(frozen=True)
class Corpus:
    train: torch.Tensor  # [bytes] uint8
    held_out: torch.Tensor
    train_files: int
    held_out_files: int
    source: str
    digest: str  # of all of it, to know it again


@dataclass(frozen=True)
class Batch:
    inputs: torch.Tensor  # [batch, context] int64
    targets: torch.Tensor
    weights: torch.Tensor  # of each target's loss: 0 where nothing can be known
    recall: torch.Tensor  # 1-based place of the target in a repeated string, 0 elsewhere
    origin: torch.Tensor  # where in the inputs a repeated target stood first, -1 elsewhere

    @property
    def graded(self) -> torch.Tensor:
        return self.recall >= FIRST_GRADED

    def to(self, device: torch.device) -> "Batch":
        tensors = (self.inputs, self.targets, self.weights, self.recall, self.origin)
        return Batch(*(tensor.to(device) for tensor in tensors))


def _standard_library() -> tuple[list[Path], str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests are not prose; encodings are near copies of one another, which would leak held-out files into training.
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "pydoc_data", "lib2to3"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    return sorted(files), f"the Python standard library in {root}"


def _text_files(text: Path) -> tuple[list[Path], str]:
    if text.is_dir():
        os.listdir(text)  # says so where it cannot be read: rglob finds nothing then
        files = [path for path in text.rglob("*") if path.is_file()]  # neither devices nor pipes
        visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(text).parts)]
        return sorted(visible), f"the files in {text}"
    text.stat()  # says what is wrong with a path to nothing
    if not text.is_file():
        raise TextError(f"{text} is neither a file nor a folder")
    return [text], f"the file {text}"


def _read(paths: list[Path]) -> list[bytes]:
    """The texts among the files, each once, until MAX_BYTES are read."""
    contents: list[bytes] = []
    seen: set[bytes] = set()  # a copy of a held-out file would be trained on
    left = MAX_BYTES
    for path in paths:
        with path.open("rb") as file:
            content = file.read(left)
        digest = hashlib.sha256(content).digest()
        if not content or b"\0" in content or digest in seen:
            continue
        seen.add(digest)
        contents.append(content)
        left -= len(content)
        if left <= 0:
            print(f"only the first {MAX_BYTES >> 20} MiB of the text are used", flush=True)
            break
    return contents


def load_corpus(text: Path | None, context: int) -> Corpus:
    """Reads `text` (a file or a folder), or by default the sources of Python's standard library.

    Raises OSError for what cannot be read, and TextError for what is not enough text for windows of `context` bytes.
    """
    paths, source = _standard_library() if text is None else _text_files(text)
    contents = _read(paths)
    if not contents:
        found = "a binary or empty file" if len(paths) == 1 else f"{len(paths)} files"
        raise TextError(f"no text in {source}: {found}" if paths else f"no files in {text}")
    if len(contents) == 1:  # one file: its last tenth is held out
        cut = len(contents[0]) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
        train, held_out = [contents[0][:cut]], [contents[0][cut:]]
    else:
        step = min(HELD_OUT_EVERY, len(contents))
        train = [content for index, content in enumerate(contents) if index % step != step - 1]
        held_out = [content for index, content in enumerate(contents) if index % step == step - 1]
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()
    corpus = Corpus(_join(train), _join(held_out), len(train), len(held_out), source, digest)
    least = MIN_WINDOWS * (context + 1)
    if min(len(corpus.train), len(corpus.held_out)) < least:
        raise TextError(
            f"too little text in {source}: {len(corpus.train)} bytes to train on and {len(corpus.held_out)} held out; "
            f"a context of {context} needs {least} of each"
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
    origin = torch.full((batch, length), -1)
    slots = length // string
    apart = -(-planting.gap // string) + 1
    wanted = int(planting.share * context / (2 * string))
    for row in range(batch):
        start = random(0, len(text) - length + 1)
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
            late = random(0, LATEST + 1)
            value = ALPHABET[torch.randint(0, len(ALPHABET), (string,), generator=generator)]
            original, repeat = first * string, second * string + late
            known = string - late
            tokens[row, original : original + string] = value
            weights[row, original : original + string] = 0
            tokens[row, repeat : repeat + known] = value[:known]
            weights[row, repeat : repeat + UNKNOWABLE] = 0
            recall[row, repeat : repeat + known] = torch.arange(1, known + 1)
            origin[row, repeat : repeat + known] = torch.arange(original, original + known)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:], recall[:, 1:], origin[:, 1:])
