#!/usr/bin/env python3
"""Trains a small byte-level language model with MiniMax Sparse Attention on real text, and measures what it learned.

The text is the source code of Python's standard library on this machine (or --text PATH); whole files are held out.
Over it, random strings are planted that return out of the reach of a window of the same size, so that only a model
that selects the right far blocks can continue them. Training goes dense on short contexts, then dense while the index
branch learns (warm-up), then sparse; a dense control continues from the same warm-up state. Results land in runs/.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from lm.config import Attention, Config, schedule
from lm.data import Corpus, load_corpus
from lm.evaluate import index_quality, quality
from lm.model import ByteModel
from lm.progress import Progress, clock
from lm.report import Results, failures, save, table
from lm.train import Trainer

EVALUATION = "evaluation"
WINDOWS = 8  # held-out windows a measurement, of each kind


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Config()
    parser.add_argument(
        "--text", type=Path, help="a text file or a folder of them, instead of Python's standard library"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every number of steps (default 1)")
    parser.add_argument("--context", type=int, default=defaults.context, help=f"bytes of context ({defaults.context})")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=defaults.block, help="tokens of a block")
    parser.add_argument("--topk", type=int, default=defaults.topk, help=f"blocks a query attends to ({defaults.topk})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the results (default: a new one in runs/)")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 unless the results show that the model learned"
    )
    options = parser.parse_args()
    if options.scale <= 0:
        parser.error("--scale must be above 0")
    if options.topk < 2:
        parser.error("--topk must be at least 2: the own block is one of them")
    if options.context < 4 * options.topk * options.block:
        parser.error(
            f"--context {options.context} is too short: {options.topk} blocks of {options.block} are more than half"
            f" of what late queries see; at least {4 * options.topk * options.block}"
        )
    return options


def train_and_measure(config: Config, corpus: Corpus, scale: float, out: Path) -> Results:
    torch.manual_seed(config.seed)
    stages = schedule(config, scale)
    short, warmup, sparse, dense = stages
    trainer = Trainer(ByteModel(config), config)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters; {len(corpus.train) / 1e6:.1f} MB to train on, ", end="")
    print(f"{len(corpus.held_out) / 1e6:.2f} MB held out ({corpus.held_out_files} files), from {corpus.source}")
    visible = config.context // config.block
    print(
        f"context {config.context}: a query attends to {config.topk} of up to {visible} blocks of {config.block} bytes"
    )

    print("measuring this machine's speed ...", flush=True)
    seconds = {stage.name: trainer.seconds_per_step(corpus.train, stage) for stage in stages}
    work = {stage.name: stage.steps for stage in stages} | {EVALUATION: 1}
    # Windows are forward passes: about a third of a training step's work each, in three kinds of selection and a probe.
    seconds[EVALUATION] = seconds[sparse.name] / sparse.batch * WINDOWS * 2.5
    with Progress(out / "metrics.csv", config.layers, work, seconds) as progress:
        print(f"about {clock(progress.left)} minutes to go; lines average over the steps since the last one")
        untrained = index_quality(trainer.model, corpus.held_out, 1)
        trainer.run(corpus.train, short, progress, config.seed + 1)
        trainer.run(corpus.train, warmup, progress, config.seed + 2)
        control = trainer.twin()
        trainer.run(corpus.train, sparse, progress, config.seed + 3)
        control.run(corpus.train, dense, progress, config.seed + 3)
        print("measuring on held-out files ...", flush=True)
        quality_by_name = {"dense control": quality(control.model, corpus.held_out, Attention.DENSE, WINDOWS)}
        for attention in (Attention.SPARSE, Attention.WINDOW, Attention.RANDOM):
            quality_by_name[attention.value] = quality(trainer.model, corpus.held_out, attention, WINDOWS)
        trained = index_quality(trainer.model, corpus.held_out, WINDOWS)
        return Results(quality_by_name, untrained, trained, progress.rows, progress.elapsed)


def main() -> int:
    options = arguments()
    config = Config(context=options.context, block=options.block, topk=options.topk, seed=options.seed)
    out: Path = options.out or Path("runs") / time.strftime("train_lm-%Y%m%d-%H%M%S")
    try:
        corpus = load_corpus(options.text, config.context)
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    try:
        results = train_and_measure(config, corpus, options.scale, out)
    except KeyboardInterrupt:
        print(f"\nstopped; the measurements up to here are in {out / 'metrics.csv'}", file=sys.stderr)
        return 130
    print()
    print(table(results))
    print("\nwritten: " + ", ".join(str(path) for path in save(results, config, out)))
    if options.check:
        missed = failures(results)
        for line in missed:
            print(f"train_lm: not learned: {line}", file=sys.stderr)
        return 1 if missed else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
