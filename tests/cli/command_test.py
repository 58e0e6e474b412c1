"""The openmsa command as people and scripts run it: exit codes, messages, files. Needs the standard library alone.

command_test.py PROGRAM [unittest arguments]
"""

# ruff: noqa: PT009 -- a machine that only builds the library has no pytest

from __future__ import annotations

import csv
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

PROGRAM = ""
LIMIT = 300  # seconds, for sanitized programs on busy machines
Tensors = dict[str, tuple[str, list[int], list[float]]]
CODES = {"F32": "f", "I32": "i", "F16": "e", "F64": "d"}


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, **options)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors: Tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = content[8 + length + begin : 8 + length + end]
        code = CODES[entry["dtype"]]
        values = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))
        tensors[name] = (entry["dtype"], entry["shape"], values)
    return tensors, metadata


def problem(tokens: int = 40, dtype: str = "F32") -> Tensors:
    """Two query heads, one KV head and one index head of dimension 4."""
    random = Random(tokens)

    def tensor(heads: int) -> tuple[str, list[int], list[float]]:
        return dtype, [tokens, heads, 4], [random.gauss(0, 1) for _ in range(tokens * heads * 4)]

    return {"q": tensor(2), "k": tensor(1), "v": tensor(1), "index_q": tensor(1), "index_k": tensor(1)}


def dense_attention(tensors: Tensors, scale: float) -> list[float]:
    (_, (tokens, heads, dim), q), (_, _, k), (_, _, v) = tensors["q"], tensors["k"], tensors["v"]
    out = []
    for i in range(tokens):
        for h in range(heads):
            row = q[(i * heads + h) * dim : (i * heads + h + 1) * dim]
            weights = [
                math.exp(scale * sum(a * b for a, b in zip(row, k[j * dim : (j + 1) * dim], strict=True)))
                for j in range(i + 1)
            ]
            out += [sum(w * v[j * dim + d] for j, w in enumerate(weights)) / sum(weights) for d in range(dim)]
    return out


class CommandTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="openmsa_command_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.x, self.y = self.folder / "x.safetensors", self.folder / "y.safetensors"

    def assert_refused(self, result: subprocess.CompletedProcess[str], *parts: str) -> None:
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, r"\Aopenmsa[^\n]*: [^\n]+\n\Z")
        for part in parts:
            self.assertIn(part, result.stderr)

    def attend(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return run("attend", "--input", self.x, "--output", self.y, *arguments, **options)


class UsageTest(CommandTest):
    def test_help(self) -> None:
        for command in ((), ("info",), ("verify",), ("bench",), ("attend",)):
            result = run(*command, "--help")
            self.assertEqual((result.returncode, result.stderr), (0, ""), command)
            self.assertGreater(len(result.stdout), 100)
        self.assertIn("attend", run("--help").stdout)
        self.assertRegex(run("--version").stdout, r"^openmsa \d+\.\d+\.\d+\n$")

    def test_wrong_usage(self) -> None:
        self.assert_refused(run(), "info, verify, bench, attend")
        self.assert_refused(run("frobnicate"), "frobnicate")
        self.assert_refused(run("info", "--frobnicate"), "--frobnicate")
        self.assert_refused(run("attend"), "--input")
        for option, value, expected in (
            ("--topk", "0", "an integer >= 1"),
            ("--topk", "1.5", "an integer >= 1"),
            ("--topk", "99999999999999999999", "an integer >= 1"),
            ("--init-blocks", "-1", "an integer >= 0"),
            ("--block-size", "48", "one of 32, 64, 128"),
            ("--scale", "nan", "a finite number > 0"),
            ("--scale", "0", "a finite number > 0"),
            ("--index-scale", "1e999", "a finite number > 0"),
            ("--backend", "tpu", "expected one of"),
            ("--threads", "0", "from 1 to 1024"),
        ):
            self.assert_refused(self.attend(option, value), option, f"got '{value}'", expected)
        self.assert_refused(run("bench", "--tokens", "12,x"), "--tokens", "'x'")
        self.assert_refused(run("bench", "--dtype", "int4"), "--dtype", "fp32, bf16, fp16")

    def test_info(self) -> None:
        described = json.loads(run("info", "--json").stdout)
        self.assertIn("cpu", [backend["name"] for backend in described["backends"]])
        self.assertGreaterEqual(described["threads"], 1)
        for name in ("commit", "compiler", "cuda", "type"):
            self.assertIn(name, described["build"])
        text = run("info")
        self.assertEqual(text.returncode, 0)
        for word in (described["version"], "msa_attention_backward", "reference", "topk"):
            self.assertIn(word, text.stdout)
        self.assertEqual(json.loads(run("--threads", "1", "info", "--json").stdout)["threads"], 1)

    def test_output_that_cannot_be_written(self) -> None:
        with open("/dev/full", "w") as full:
            result = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("No space left", result.stderr)


class AttendTest(CommandTest):
    def test_all_blocks_are_dense_attention(self) -> None:
        tensors = problem()
        write_safetensors(self.x, tensors)
        result = self.attend("--topk", 2, "--block-size", 32, "--scale", 0.3)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        outputs, metadata = read_safetensors(self.y)
        self.assertEqual(list(outputs), ["out", "lse", "indices", "index_lse"])
        self.assertEqual([entry[:2] for entry in outputs.values()],
                         [("F32", [40, 2, 4]), ("F32", [2, 40]), ("I32", [1, 40, 2]), ("F32", [1, 40])])  # fmt: skip
        for got, want in zip(outputs["out"][2], dense_attention(tensors, 0.3), strict=True):
            self.assertAlmostEqual(got, want, places=5)
        self.assertEqual(outputs["indices"][2], [0, -1] * 32 + [0, 1] * 8)
        self.assertEqual(metadata["scale"], "0.3")
        self.assertEqual(metadata["index_scale"], "0.5")
        self.assertEqual((metadata["topk"], metadata["block_size"]), ("2", "32"))
        self.assertEqual(list(self.folder.glob("*partial*")), [])

    def test_packed_sequences(self) -> None:
        tensors = problem()
        tensors["cu_seqlens_q"] = tensors["cu_seqlens_k"] = ("I32", [3], [0, 10, 40])
        write_safetensors(self.x, tensors)
        self.assertEqual(self.attend("--block-size", 32).returncode, 0)
        outputs, _ = read_safetensors(self.y)
        # The first token of each sequence sees itself alone.
        v, out = tensors["v"][2], outputs["out"][2]
        for token in (0, 10):
            for got, want in zip(out[token * 8 : token * 8 + 4], v[token * 4 : token * 4 + 4], strict=True):
                self.assertAlmostEqual(got, want, places=5)
        tensors["cu_seqlens_q"] = ("I32", [3], [0, 30, 20])
        write_safetensors(self.x, tensors)
        self.assert_refused(self.attend("--block-size", 32), "cu_seqlens_q")

    def test_wrong_tensors(self) -> None:
        def changed(name: str, entry: tuple[str, list[int], list[float]] | None) -> None:
            tensors = problem()
            if entry is None:
                del tensors[name]
            else:
                tensors[name] = entry
            write_safetensors(self.x, tensors)

        self.y.write_text("stays")
        for name, entry, parts in (
            ("k", None, ("k: missing", "[Tk, Hkv, D]")),
            ("v", ("F64", [40, 1, 4], [0.0] * 160), ("v: got type F64", "F32, F16 or BF16")),
            ("q", ("F32", [40, 8], [0.0] * 320), ("q: got a tensor of 2 axes", "[Tq, Hq, D]")),
            ("v", ("F32", [39, 1, 4], [0.0] * 156), ("v: ",)),
            ("k", ("F16", [40, 1, 4], [0.0] * 160), ("k: ", "float16")),
            ("index_q", ("F32", [40, 3, 4], [0.0] * 480), ("index_q: got Hi = 3", "Hq = 2")),
            ("q", ("F32", [40, 0, 4], []), ("q",)),
            ("cu_seqlens_q", ("I32", [2], [0, 40]), ("cu_seqlens_k",)),
            ("cu_seqlens_q", ("F32", [2], [0, 40]), ("cu_seqlens",)),
        ):
            changed(name, entry)
            self.assert_refused(self.attend(), str(self.x), *parts)
            self.assertEqual(self.y.read_text(), "stays")
        self.assertEqual(len(list(self.folder.iterdir())), 2)

    def test_unused_tensors_are_mentioned(self) -> None:
        write_safetensors(self.x, {**problem(), "extra\n": ("F32", [], [1.0])})
        result = self.attend("--block-size", 32)
        self.assertEqual(result.returncode, 0)
        self.assertIn("tensor 'extra\\x0a' is not used", result.stderr)

    def test_what_is_no_safetensors_file(self) -> None:
        self.assert_refused(self.attend(), str(self.x), "No such file")
        self.x.write_bytes(b"")
        self.assert_refused(self.attend(), "0 bytes")
        self.x.write_bytes(b"\xff" * 100)
        self.assert_refused(self.attend(), "header would have")
        self.x.write_bytes(struct.pack("<Q", 10**7) + b"{")
        self.assert_refused(self.attend(), "cut off")
        write_safetensors(self.x, problem())
        self.x.write_bytes(self.x.read_bytes()[:-1])
        self.assert_refused(self.attend(), "bytes follow the header")
        self.x.unlink()
        self.x.mkdir()
        self.assert_refused(self.attend(), "a directory")
        self.x.rmdir()
        os.mkfifo(self.x)
        self.assert_refused(self.attend(), "a device or pipe")
        self.assert_refused(run("attend", "--input", "/dev/zero", "--output", self.y), "a device or pipe")
        self.assertFalse(self.y.exists())

    def test_more_than_the_memory(self) -> None:
        shape = [2**20, 2**20, 1]  # 4 TiB that the file really has, as a hole
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**42]}
        small = problem(1)
        header: dict[str, Any] = {"q": entry}
        for name in list(small)[1:]:
            header[name] = {"dtype": "F32", "shape": [0, 1, 1], "data_offsets": [2**42, 2**42]}
        text = json.dumps(header).encode()
        self.x.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(self.x, 8 + len(text) + 2**42)
        self.assert_refused(self.attend(), "GiB")
        write_safetensors(self.x, problem())
        self.assert_refused(self.attend("--topk", 10**12), "GiB")
        self.assert_refused(self.attend("--topk", 2**62), "64 bits")

    def test_places_that_cannot_be_written(self) -> None:
        write_safetensors(self.x, problem())
        content = self.x.read_bytes()
        (self.folder / "link").symlink_to(self.x)
        os.link(self.x, self.folder / "hard")
        for name in ("x.safetensors", "link", "hard"):
            result = run("attend", "--input", self.x, "--output", self.folder / name)
            self.assert_refused(result, name, "is the input file")
        self.assertEqual(self.x.read_bytes(), content)
        self.assert_refused(run("attend", "--input", self.x, "--output", self.folder), "a directory")
        self.assert_refused(run("attend", "--input", self.x, "--output", "/dev/null"), "a device or pipe")
        self.assert_refused(run("attend", "--input", self.x, "--output", self.folder / "no" / "y"), "No such file")
        self.assert_refused(run("attend", "--input", self.x, "--output", self.folder / ("y" * 300)), "too long")

    def test_a_full_disk_keeps_what_was_there(self) -> None:
        write_safetensors(self.x, problem())
        self.y.write_text("stays")

        def limit_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

        self.assert_refused(self.attend("--block-size", 32, preexec_fn=limit_files), str(self.y), "File too large")
        self.assertEqual(self.y.read_text(), "stays")
        self.assertEqual(len(list(self.folder.iterdir())), 2)

    def test_killed_midway(self) -> None:
        tokens, heads, dim = 4096, 16, 64
        zeros = [0.0] * (tokens * heads * dim)

        def tensor(count: int) -> tuple[str, list[int], list[float]]:
            return "F16", [tokens, count, dim], zeros[: tokens * count * dim]

        write_safetensors(
            self.x, {"q": tensor(heads), **{name: tensor(1) for name in ("k", "v", "index_q", "index_k")}}
        )
        self.y.write_text("stays")
        arguments = ("attend", "--input", self.x, "--output", self.y, "--backend", "reference", "--topk", "64")
        for number in (signal.SIGINT, signal.SIGTERM):
            interrupted(arguments, number, lambda: list(self.folder.glob("*.partial")))
            self.assertEqual(self.y.read_text(), "stays")
            self.assertEqual(len(list(self.folder.iterdir())), 2)


def interrupted(arguments: tuple[object, ...], number: signal.Signals, started: Callable[[], object]) -> str:
    """Sends the signal once `started` holds; the command must end with its number at once."""
    command = [PROGRAM, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT
    while not started():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number, process.returncode
    return output


class BenchTest(CommandTest):
    small = ("--heads", 2, "--head-dim", 16, "--index-dim", 8, "--seconds", 0.01, "--block-size", 32, "--topk", 2)

    def test_table_and_csv(self) -> None:
        path = self.folder / "times.csv"
        result = run("bench", *self.small, "--tokens", "100,257", "--dtype", "fp32", "--csv", path)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("dense/sparse", result.stdout)
        self.assertIn("same attend kernels", result.stdout)
        with path.open() as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["tokens"] for row in rows], ["100", "257"])
        for row in rows:
            ratio = float(row["dense_ms"]) / float(row["sparse_ms"])
            self.assertAlmostEqual(float(row["dense_over_sparse"]) / ratio, 1, places=2)
            self.assertTrue(all(row[name] for name in row if name not in ("target", "commit")), row)

    def test_wrong_usage(self) -> None:
        self.assert_refused(run("bench", "--tokens", 2**39), "--tokens", "GiB")
        self.assert_refused(run("bench", "--tokens", 2**40, "--heads", 65536, "--head-dim", 65536), "64 bits")
        self.assert_refused(
            run("bench", *self.small, "--tokens", 64, "--index-heads", 3), "--index-heads: got 3", "--heads 2"
        )
        self.assert_refused(run("bench", "--csv", self.folder / "no" / "times.csv"), "No such file")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_interrupt(self) -> None:
        path = self.folder / "times.csv"
        arguments = ("bench", "--tokens", 2048, "--seconds", 1000, "--csv", path)
        interrupted(arguments, signal.SIGINT, lambda: list(self.folder.glob("*.partial")))
        self.assertEqual(list(self.folder.iterdir()), [])


class VerifyTest(CommandTest):
    def test_this_machine(self) -> None:
        result = run("verify", "--json", "--backend", "cpu")
        self.assertEqual(result.returncode, 0, result.stdout[-3000:] + result.stderr)
        report = json.loads(result.stdout)
        self.assertTrue(report["passed"])
        cases = report["cases"]
        operations = {case["operation"].split()[0] for case in cases}
        (cpu,) = (b for b in json.loads(run("info", "--json").stdout)["backends"] if b["name"] == "cpu")
        self.assertEqual(operations, set(cpu["operations"]))
        self.assertLessEqual({"1", "127", "128", "129", "2049"}, {case["tokens"] for case in cases})
        for case in cases:
            self.assertTrue(case["results"], case)
            for entry in case["results"]:
                self.assertLessEqual(entry["error"], entry["limit"])

    def test_wrong_usage(self) -> None:
        self.assert_refused(run("verify", "--backend", "tpu"), "--backend", "'tpu'", "expected one of")


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
