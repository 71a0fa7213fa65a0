"""kill -9 on a real run, at random moments and inside a checkpoint's write; then resume, and compare every bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmattn.training.checkpoint import CheckpointFolder, read

REPOSITORY = Path(__file__).resolve().parent.parent
SETTINGS = ["size=tiny", "fit.epochs=8", "final.num_beams=[1]", "fit.checkpoint_minutes=0.001", "limit.train=64"]
WORDS = ["ein", "Hund", "eine", "Katze", "rennt", "schläft", "und", "hier", "dort", "nie"]

# Runs `train.main` and kills its own process: seconds after its first batch, or halfway through its n-th checkpoint.
DRIVER = """
import os, signal, sys, threading
import numpy as np
from experiments import train
from mmattn.training.fit import TrainingLoop

how, amount = sys.argv[1], float(sys.argv[2])
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
batch_done, savez, writes = TrainingLoop._batch_done, np.savez, []

def first_batch(self, logs):
    if how == "after" and not writes:
        writes.append(0)
        threading.Timer(amount, kill).start()
    batch_done(self, logs)

def half_a_file(file, **arrays):
    savez(file, **arrays)
    writes.append(1)
    if how == "write" and len(writes) == amount:
        file.truncate(file.tell() // 2)
        kill()

TrainingLoop._batch_done, np.savez = first_batch, half_a_file
sys.exit(train.main(sys.argv[3:]))
"""


def run(how, amount, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", DRIVER, how, str(amount), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["captioning", "translation"])
def test_killed_at_random_moments_and_resumed_ends_with_the_same_bits(tmp_path, task):
    settings = list(SETTINGS)
    if task == "translation":  # batches of several shapes, weights of several validations
        chosen = random.Random(1)
        pairs = [[chosen.choice(WORDS) for _ in range(chosen.randint(1, 9))] for _ in range(400)]
        text = "".join(f"{' '.join(words)}\t{' '.join(words[::-1])}\n" for words in pairs)
        (tmp_path / "pairs.tsv").write_text(text, encoding="utf-8")
        settings += ["experiment=pairs", f"data.path={tmp_path / 'pairs.tsv'}", "fit.snapshots=2", "fit.epochs=4"]
    done = run("never", 0, *settings, f"run.root={tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    (whole,) = (tmp_path / "whole").iterdir()

    chance = random.Random()
    moments = [
        ("after", chance.uniform(0, 1.5)),
        ("write", 3),
        ("after", chance.uniform(0, 3)),
        ("after", chance.uniform(0, 3)),
    ]
    arguments = [*settings, f"run.root={tmp_path / 'killed'}"]
    for how, amount in moments:
        died = run(how, amount, *arguments)
        assert died.returncode in (-signal.SIGKILL, 0), died.stderr
        (killed,) = (tmp_path / "killed").iterdir()
        if how == "write" and died.returncode:
            assert list(killed.rglob("*.tmp"))
        arguments = [f"resume={killed}"]
    done = run("never", 0, *arguments)
    assert done.returncode == 0, done.stderr
    assert not list(killed.rglob("*.tmp"))

    note = f"killed at {moments}"
    for path in ("best.npz", f"checkpoints/{CheckpointFolder(whole / 'checkpoints').files()[-1].name}"):
        (arrays, info), (others, other_info) = read(whole / path), read(killed / path)
        assert info == other_info, note
        assert arrays.keys() == others.keys()
        for name, array in arrays.items():
            assert (
                np.array_equal(array.view("uint8"), others[name].view("uint8")) if array.ndim else array == others[name]
            ), note
    for path in ("tokenizer.model", "metrics.jsonl", "bundle/weights.npz", "results.json", "predictions.jsonl"):
        assert (whole / path).read_bytes() == (killed / path).read_bytes(), f"{path}, {note}"


@pytest.mark.slow
def test_ctrl_c_says_how_to_continue(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "experiments.train", "size=tiny", "fit.epochs=5000", f"run.root={tmp_path}"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("epoch 1/"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    (folder,) = tmp_path.iterdir()
    assert process.returncode == 130
    assert f"Continue with: mmattn train resume={folder}" in errors
    assert "Traceback" not in errors
    assert CheckpointFolder(folder / "checkpoints").latest() is not None
