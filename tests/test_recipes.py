"""Whole trainings with a known answer, by the command that a user would give, in a process of its own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import flax_gpt as fg
from flax_gpt import data
from flax_gpt.training.run import load_run

pytestmark = pytest.mark.slow


def train(folder, *arguments):
    """Runs `flax-gpt train`; returns what it printed and its metrics."""
    program = "import sys; from flax_gpt.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", *arguments, "--out", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # at full speed
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_sort_is_solved_exactly(tmp_path):
    said, _ = train(tmp_path / "run", "--task", "sort")
    assert "729 of 729 questions answered exactly" in said
    run = load_run(tmp_path / "run")
    prompts, answers = data.Sort().exam()
    written = fg.generate(run.config, run.params, list(prompts[::7]), 6, temperature=0.0, sliding=True)
    np.testing.assert_array_equal(np.asarray(written.tokens), answers[::7])


def test_a_markov_chain_is_learnt_to_its_entropy_rate_and_no_further(tmp_path):
    said, metrics = train(tmp_path / "run", "--task", "markov")
    task = data.MarkovChain()
    batches = list(task.validation_batches(64))
    best = np.mean([task.best_loss(batch) for batch in batches])
    assert f"the best possible on these sequences is {best:.4f}" in said
    # Held against the true probabilities on the same sequences, so that little sampling error is left.
    assert -0.001 < metrics[-1]["val_loss"] - best < 0.01
    assert abs(best - task.optimum) < 0.02


def test_induction_is_learnt_by_two_layers(tmp_path):
    _, metrics = train(tmp_path / "run", "--task", "induction")
    assert metrics[-1]["val_loss"] < 0.1


def test_the_built_in_text_is_learnt(tmp_path):
    said, metrics = train(tmp_path / "run", "--steps", "300")
    assert metrics[-1]["val_loss"] < 2.3 < metrics[0]["val_loss"]
    assert "it writes, after" in said
