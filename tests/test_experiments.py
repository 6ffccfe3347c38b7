"""Every experiment runs, in a small setting."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
pytestmark = pytest.mark.slow


def run(name, *arguments):
    done = subprocess.run([sys.executable, EXPERIMENTS / name, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_speedrun_prints_and_writes_what_came_out(tmp_path):
    said = run("speedrun_char.py", "--smoke", "--out", tmp_path, "--recipes", "Muon, linear to 0")
    assert "the loss to reach: 1.8900" in said
    assert "after 10 steps" in said
    result = json.loads((tmp_path / "speedrun.json").read_text())
    lines = result["lines"]["Muon, linear to 0"]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    assert (tmp_path / "speedrun.png").exists()


def test_the_benchmark_of_a_sweep_prints_ratios():
    said = run("bench_sweep.py", "--steps", "10", "--rounds", "1", "--seeds", "2")
    result = json.loads(said.splitlines()[-1])
    for part in ("steps", "all"):
        assert result[part]["fit"] > 0 < result[part]["fit_many"]
    assert said.count("ratio") == 2


def test_the_benchmark_of_a_step_prints_a_time():
    result = json.loads(run("bench_train_step.py", "--rounds", "2", "--steps", "1").splitlines()[-1])
    assert all(value > 0 for value in result["milliseconds"].values())


def test_the_benchmark_of_generation_prints_steps_and_ratios():
    said = run("bench_generate.py", "--smoke", "--rounds", "2", "--new", "8")
    result = json.loads(said.splitlines()[-1])
    assert result["floor_ms"] > 0 < result["late_over_early"]
    for batch in ("1", "8"):
        assert all(step > 0 for step in result["steps_ms"][batch].values())
        assert {"flax_gpt float32", "flax_gpt bfloat16"} <= result["steps_ms"][batch].keys()
