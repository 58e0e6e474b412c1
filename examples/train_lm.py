#!/usr/bin/env python3
"""Trains a small byte-level language model with MiniMax Sparse Attention on real text, and measures what it learned.

The text is the source code of Python's standard library on this machine (or --text PATH); whole files are held out.
Over it, random strings are planted that return out of the reach of a window of the same size, so that only a model
that selects the right far blocks can continue them. Training goes dense while the index branch learns (warm-up), on
short contexts and then on full ones, and then sparse; a dense control continues from the same warm-up state. Results
land in runs/.

Ctrl-C stops it with its state saved; the same --out, or --resume, goes on from there.
Exit codes: 0 done, 1 --check missed or a file could not be written, 2 wrong arguments or text, 130 stopped.
"""

import argparse
import dataclasses
import io
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lm import checkpoint, picture, report
from lm.activations import save_activations
from lm.config import CONTROL, Settings
from lm.data import TextError, load_corpus
from lm.interrupt import Interrupt, Stopped
from lm.machine import serving_backend
from lm.run import Run

RUNS = Path("runs")
BLOCKS = (32, 64, 128)
MOST_SCALE = 1000  # months
OPERATIONS = {  # that a device must have here
    "select_blocks",
    "sparse_attention",
    "msa_attention",
    "msa_attention_backward",
    "paged_msa_attention",
    "paged_append",
    "captured_mass",
}


class UsageError(ValueError):
    """Arguments that cannot be followed; the message says which and why."""


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(
        prog="train_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    run = own.add_argument_group("the run", "a run that continues keeps these; other ones given for it are an error")
    run.add_argument("--text", help="a text file or a folder of them, instead of Python's standard library")
    run.add_argument("--scale", type=float, help=f"factor on every number of steps ({default.scale:g})")
    run.add_argument("--context", type=int, help=f"bytes of context ({default.context})")
    run.add_argument("--block", type=int, choices=BLOCKS, help=f"tokens of a block ({default.block})")
    run.add_argument("--topk", type=int, help=f"blocks a query attends to ({default.topk})")
    run.add_argument("--seed", type=int, help=f"of weights and windows ({default.seed})")
    own.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where openmsa has all operations for it")
    own.add_argument("--out", type=Path, help="folder for the results (a new one in runs/); a checkpoint in it goes on")
    own.add_argument("--resume", action="store_true", help="go on with --out, or with the newest run in runs/")
    own.add_argument("--check", action="store_true", help="exit with 1 unless the results show that the model learned")
    own.add_argument("--save-activations", type=Path, metavar="DIR", help="save each layer's q, k, v, index_q, index_k")
    own.add_argument("--activations-length", type=int, metavar="BYTES", help="of them (default: the context)")
    return own


def settings_of(options: argparse.Namespace, saved: dict[str, Any] | None, out: Path) -> Settings:
    """From the arguments, or from the checkpoint in `out` of the run that goes on."""
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Settings)
        if getattr(options, field.name) is not None
    }
    if "text" in given:
        given["text"] = str(Path(given["text"]).absolute())
    if saved is None:
        settings = Settings(**given)
    else:
        with checkpoint.reading(out):
            settings = Settings(**saved["settings"])
            settings.check_types()
        for name, value in given.items():
            if value != getattr(settings, name):
                raise UsageError(
                    f"--{name}: got {value}, but the run that goes on was started with {getattr(settings, name)}"
                    " (another --out starts a new one)"
                )
    return checked(settings, options)


def checked(settings: Settings, options: argparse.Namespace) -> Settings:
    if not 0 < settings.scale <= MOST_SCALE:
        raise UsageError(f"--scale: got {settings.scale:g}, expected a number above 0, at most {MOST_SCALE}")
    if settings.block not in BLOCKS:
        raise UsageError(f"--block: got {settings.block}, expected one of {', '.join(map(str, BLOCKS))}")
    if settings.topk < 2:
        raise UsageError(f"--topk: got {settings.topk}, expected at least 2: the own block is one of them")
    if not 0 <= settings.seed < 2**62:
        raise UsageError(f"--seed: got {settings.seed}, expected 0 to 2^62")
    least = 4 * settings.topk * settings.block
    if settings.context < least:
        raise UsageError(
            f"--context: got {settings.context}, expected at least {least}: {settings.topk} blocks of {settings.block}"
            " would be more than half of what late queries see"
        )
    if options.check and report.bars(settings.scale) is None:
        raise UsageError(
            f"--check: --scale {settings.scale:g} is too short to learn, expected {report.SHORTEST} or more"
        )
    if options.activations_length is not None and options.save_activations is None:
        raise UsageError("--activations-length: needs --save-activations")
    return settings


def device_of(options: argparse.Namespace, block: int) -> torch.device:
    cuda = torch.cuda.is_available() and block >= 64 and serving_backend("gpu", OPERATIONS) is not None
    if options.device == "cuda" and not cuda:
        if not torch.cuda.is_available():
            raise UsageError("--device: got cuda, but PyTorch finds no GPU here")
        raise UsageError("--device: got cuda, but openmsa cannot train there (blocks of 64 or 128; see openmsa.info())")
    return torch.device(options.device or ("cuda" if cuda else "cpu"))


def output_folder(options: argparse.Namespace) -> Path:
    if options.out is not None:
        out: Path = options.out
    elif options.resume:
        found = sorted(RUNS.glob(f"train_lm-*/{checkpoint.NAME}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UsageError(f"--resume: no run to go on with in {RUNS}/")
        out = found[-1].parent
    else:
        out = RUNS / time.strftime("train_lm-%Y%m%d-%H%M%S")
    return out


def prepare(options: argparse.Namespace) -> Run:
    out = output_folder(options)
    saved = checkpoint.load(out)
    if options.resume and saved is None:
        raise UsageError(f"--resume: no {checkpoint.NAME} in {out}")
    settings = settings_of(options, saved, out)
    device = device_of(options, settings.block)
    corpus = load_corpus(None if settings.text is None else Path(settings.text), settings.context)
    length, most = options.activations_length, len(corpus.held_out) - 1
    if length is not None and not settings.context <= length <= most:
        raise UsageError(
            f"--activations-length: got {length}, expected {settings.context} (the context) to {most}"
            " (what is held out)"
        )
    out.mkdir(parents=True, exist_ok=True)  # not before all else is right: it would stay behind empty
    run = Run(settings, corpus, device, out)
    if saved is not None:
        if saved["text_digest"] != corpus.digest:
            raise UsageError(f"the text of the run in {out} has changed since: {corpus.source}")
        with checkpoint.reading(out):
            run.restore(saved)
    print(run.describe())
    if saved is not None:
        print(f"going on with {out}: {run.stages[run.stage].name}, step {run.position.step}")
    return run


def finish(run: Run, options: argparse.Namespace) -> int:
    results = run.measure()
    held_out, out = run.corpus.held_out, run.out
    assert run.progress is not None
    written = [run.progress.save(out), report.save(results, run.settings, run.config, out)]
    written.append(report.save_model(run.model, out / "model.safetensors"))
    written.append(report.save_model(run.trainers[CONTROL].model, out / "control.safetensors"))
    if picture.draw(results, run.stages, run.model, held_out, out / "report.png"):
        written.append(out / "report.png")
    if options.save_activations is not None:
        length = options.activations_length or run.config.context
        written += save_activations(run.model, held_out, length, options.save_activations)
    print()
    print(report.table(results, run.config))
    print("\nwritten: " + ", ".join(str(path) for path in written))
    required = report.bars(run.settings.scale)
    if not options.check or required is None:
        return 0
    missed = report.failures(results, required)
    for line in missed:
        print(f"train_lm: not learned: {line}", file=sys.stderr)
    return 1 if missed else 0


def how_to_continue(out: Path) -> str:
    if (out / checkpoint.NAME).exists():
        return f"the last state is in {out / checkpoint.NAME}; continue with: train_lm.py --out {out}"
    return "nothing was saved yet"


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    out: Path | None = None
    with Interrupt() as interrupt:
        try:
            try:
                run = prepare(options)
            except (UsageError, TextError, checkpoint.CheckpointError) as error:
                print(f"train_lm: {error}", file=sys.stderr)
                return 2
            except OSError as error:
                print(f"train_lm: {said(error)}", file=sys.stderr)
                return 2
            out = run.out
            with run:
                run.train(interrupt)
                return finish(run, options)
        except checkpoint.InUseError as error:
            print(f"train_lm: {error}", file=sys.stderr)
            return 2
        except (KeyboardInterrupt, Stopped):
            where = how_to_continue(out) if out is not None else "nothing was started yet"
            print(f"\ntrain_lm: stopped; {where}", file=sys.stderr)
            return 130
        except OSError as error:
            where = how_to_continue(out) if out is not None else "nothing was started yet"
            print(f"\ntrain_lm: {said(error)}; {where}", file=sys.stderr)
            return 1


def said(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror or error)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may hold any bytes
    sys.exit(main())
