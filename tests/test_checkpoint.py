"""Checkpoints: a run that was interrupted comes to the very bits of one that was not; damage is noticed."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import CONFIG as PLAIN
from counting import PARAMS, Counting

from flax_gpt import training
from flax_gpt.training.checkpoint import checksum
from flax_gpt.training.metrics import MetricsFile, read_metrics

CONFIG = dataclasses.replace(PLAIN, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
TRAIN = training.TrainConfig(
    steps=20, batch_size=6, micro_batches=2, ema_decay=0.9, warmup_steps=2, log_every=4, eval_every=5, eval_batches=1,
    checkpoint_every=7,
)  # fmt: skip
CLOCKS = ("seconds", "tokens_per_second", "flops_per_second")


def run_into(folder, train=TRAIN, report=None):
    return training.fit(CONFIG, train, Counting(), params=PARAMS, folder=folder, report=report)


def interrupted_at(step):
    """A report that asks the run, once, to stop after the step under way."""
    steps = [step]

    def report(line):
        if line["step"] in steps:
            steps.clear()
            signal.raise_signal(signal.SIGTERM)

    return report


def without_clocks(lines):
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def raw(state):
    return state._replace(dropout_key=jax.random.key_data(state.dropout_key))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without interruption, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run_into(folder), folder


@pytest.mark.parametrize("step", [4, pytest.param(10, marks=pytest.mark.slow)])  # amid a line's steps; at an evaluation
def test_an_interrupted_run_goes_on_to_the_same_bits(whole, tmp_path, step):
    expected, reference = whole
    first = run_into(tmp_path, report=interrupted_at(step))
    assert first.interrupted == signal.SIGTERM
    assert first.step < 20
    result = run_into(tmp_path)
    assert result.interrupted is None
    chex.assert_trees_all_equal(raw(result.state), raw(expected.state))
    lines = read_metrics(tmp_path)
    assert without_clocks(lines) == without_clocks(expected.metrics)
    assert lines == result.metrics
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert without_clocks(read_metrics(reference)) == without_clocks(lines)


def test_a_finished_run_is_not_run_again(whole, tmp_path):
    expected, reference = whole
    shutil.copytree(reference, tmp_path / "again")
    before = (tmp_path / "again/metrics.jsonl").read_bytes()
    result = run_into(tmp_path / "again")
    chex.assert_trees_all_equal(raw(result.state), raw(expected.state))
    assert result.metrics == expected.metrics
    assert (tmp_path / "again/metrics.jsonl").read_bytes() == before


def test_the_latest_are_kept_and_the_best_and_each_can_be_read(whole):
    expected, folder = whole
    losses = {line["step"]: line["val_loss"] for line in expected.metrics if "val_loss" in line}
    with training.Checkpoints(folder / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [14, 20]
        assert checkpoints.find() == 20
        assert checkpoints.find("best") == 20  # the only one at a step of evaluation
        assert checkpoints.notes(20)["val_loss"] == losses[20]
        assert checkpoints.notes(14)["val_loss"] is None
        average = checkpoints.restore_params(PARAMS)
        chex.assert_trees_all_equal(average, expected.params)
        with pytest.raises(FileNotFoundError, match=r"checkpoints holds no checkpoint 7; its steps are \[14, 20\]"):
            checkpoints.find(7)


def test_the_best_is_the_one_of_the_lowest_validation_loss(tmp_path):
    state = training.init_state({"wte": jnp.arange(6.0).reshape(2, 3)}, training.make_optimizer(TRAIN))
    with training.Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(FileNotFoundError, match=r"holds no checkpoint best; its steps are \[\]"):
            checkpoints.find("best")
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
            now = state._replace(step=jnp.asarray(step, jnp.int32), params={"wte": state.params["wte"] + step})
            checkpoints.save(now, {}, loss)
        with pytest.raises(ValueError, match="already holds a checkpoint of step 4"):
            checkpoints.save(now, {})
    with training.Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [2, 4]
        assert checkpoints.find("best") == 2
        restored = checkpoints.restore(state, "best")
        chex.assert_trees_all_equal(restored.params["wte"], state.params["wte"] + 2)
        assert restored.dropout_key is None
        assert restored.average is None


def test_a_checkpoint_of_another_run_is_refused_with_the_differences(whole, tmp_path):
    _, folder = whole
    shutil.copytree(folder, tmp_path / "copy")
    before = files_in(tmp_path / "copy")
    other = dataclasses.replace(TRAIN, lr=0.5, seed=3)
    with pytest.raises(ValueError, match=r"seed: 1337 in the checkpoint, 3 now; lr: 0.001 in the checkpoint, 0.5 now"):
        run_into(tmp_path / "copy", other)
    with pytest.raises(ValueError, match="n_inner: None in the checkpoint, 7 now"):
        training.fit(dataclasses.replace(CONFIG, n_inner=7), TRAIN, Counting(), folder=tmp_path / "copy")

    class Other(Counting):
        def training_batch(self, seed, step, batch_size):
            return super().training_batch(seed + 1, step, batch_size)

    with pytest.raises(ValueError, match=r"another run: first batch \(checksum\): \d+ in the checkpoint, \d+ now"):
        training.fit(CONFIG, TRAIN, Other(), folder=tmp_path / "copy")
    assert files_in(tmp_path / "copy") == before
    run_into(tmp_path / "copy", dataclasses.replace(TRAIN, checkpoint_every=3, max_skipped=1))  # these may differ


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Of several reads that fail, Orbax waits for the first alone; the others then miss its event loop, and say so when they
# are collected: in the test that caused them, and not in whichever one comes later.
SEVERAL_READS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def collected():
    yield
    gc.collect()


@SEVERAL_READS
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    ("item", "damage"),
    [
        pytest.param(item, damage, marks=[] if item == first else pytest.mark.slow)
        for damage, first in ((flip, "params"), (Path.unlink, "rest"))
        for item in ("params", "average", "rest", "notes")
    ],
)
def test_a_damaged_checkpoint_is_noticed_and_left_as_it_is(whole, tmp_path, item, damage):
    _, folder = whole
    shutil.copytree(folder, tmp_path / "copy")
    stored = [path for path in files_in(tmp_path / "copy/checkpoints/20" / item) if path.parent.name in ("d", "notes")]
    assert stored
    for path in stored:
        damage(path)
    before = files_in(tmp_path / "copy")
    with pytest.raises(ValueError, match="checkpoints/20 is damaged.*move this folder away"):
        run_into(tmp_path / "copy")
    assert files_in(tmp_path / "copy") == before
    shutil.move(tmp_path / "copy/checkpoints/20", tmp_path / "away")
    assert run_into(tmp_path / "copy").step == 20


@SEVERAL_READS
@pytest.mark.usefixtures("collected")
@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damage_to_any_one_file_is_noticed_or_harmless(whole, tmp_path, damage):
    expected, folder = whole
    checkpoint = folder / "checkpoints/20"
    noticed = {}
    for number, path in enumerate(sorted(files_in(checkpoint))):
        copy = tmp_path / str(number)
        shutil.copytree(folder / "checkpoints", copy)
        damage(copy / "20" / path.relative_to(checkpoint))
        try:
            with training.Checkpoints(copy, read_only=True) as checkpoints:
                chex.assert_trees_all_equal(raw(checkpoints.restore(expected.state, 20)), raw(expected.state))
        except (ValueError, FileNotFoundError) as error:
            noticed[path] = str(error).replace(str(copy), "HERE")
    assert all("HERE/20" in message or "HERE holds no checkpoint 20" in message for message in noticed.values())
    assert {path.relative_to(checkpoint).parts[0] for path in noticed} >= {"params", "average", "rest", "notes"}


def test_a_folder_that_another_process_trains_into_is_refused(tmp_path):
    program = (
        "import sys, fcntl; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError, match=f"another process is training into {tmp_path}"):
            run_into(tmp_path)
        other.communicate()
    with MetricsFile(path):  # its end is the end of its lock
        pass


def test_a_disk_that_takes_no_more_is_an_error_and_leaves_what_there_was(tmp_path):
    resource = pytest.importorskip("resource")
    table = np.random.default_rng(0).normal(size=(500, 100)).astype(np.float32)  # cannot be compressed
    state = training.init_state({"wte": jnp.asarray(table)}, training.make_optimizer(TRAIN))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
    try:
        checkpoints = training.Checkpoints(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        checkpoints.save(state._replace(step=jnp.asarray(1, jnp.int32)), {})
        with pytest.raises(OSError, match=f"cannot write a checkpoint to {tmp_path}: "):
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with training.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [0]
        chex.assert_trees_all_equal(checkpoints.restore(state).params, state.params)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(OSError, match=f"cannot write checkpoints to {tmp_path}/checkpoints"):
        run_into(tmp_path)


def test_a_run_that_left_no_checkpoint_is_not_overwritten_by_one_that_leaves_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(FileExistsError, match="already holds the metrics of a run, and no checkpoint"):
        run_into(tmp_path, dataclasses.replace(TRAIN, checkpoint_every=None))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_metrics_are_cut_back_to_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "é": 1}\n{"step": 2}\n{"st')
    assert read_metrics(tmp_path) == [{"step": 0}, {"step": 1, "é": 1}, {"step": 2}]
    with MetricsFile(path) as file:
        with pytest.raises(ValueError, match="has 4 lines, fewer than the 5"):
            file.rewind(5)
        with pytest.raises(ValueError, match="fewer than the 4"):
            file.rewind(4)
        assert file.rewind(2) == [{"step": 0}, {"step": 1, "é": 1}]
        file.write({"step": 7})
    assert path.read_text() == '{"step": 0}\n{"step": 1, "é": 1}\n{"step": 7}\n'


def test_a_change_of_any_bit_changes_the_checksum():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(3, 5)).astype(np.float32), "b": np.arange(4, dtype=np.int32), "c": np.float32(2)}
    sums = []
    for name, leaf in tree.items():
        for bit in range(8 * leaf.nbytes):
            raw_bytes = bytearray(leaf.tobytes())
            raw_bytes[bit // 8] ^= 1 << bit % 8
            changed = np.frombuffer(bytes(raw_bytes), leaf.dtype).reshape(leaf.shape)
            sums.append(int(checksum({**tree, name: changed})))
    assert len(sums) == 8 * sum(leaf.nbytes for leaf in tree.values())
    assert int(checksum(tree)) not in sums
    swapped = {**tree, "b": tree["b"][::-1].copy()}
    assert int(checksum(swapped)) != int(checksum(tree))


CHILD = """
import json, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np
import test_checkpoint as t
result = t.run_into(sys.argv[1])
print(json.dumps([result.step, int(t.checksum(t.raw(result.state)))]))
"""


def start_child(folder):
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(tests=str(tests)), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.slow
def test_another_process_goes_on_to_the_same_bits(whole, tmp_path):
    expected, _ = whole
    assert run_into(tmp_path, report=interrupted_at(8)).step in (9, 10)
    with start_child(tmp_path) as child:
        output, _ = child.communicate()
    assert json.loads(output) == [20, int(checksum(raw(expected.state)))]
    assert without_clocks(read_metrics(tmp_path)) == without_clocks(expected.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])  # two processes of pytest share the work
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(whole, tmp_path, half):
    """Twenty-five times in each half: a child is killed at a random moment, until one comes to the end."""
    expected, _ = whole
    rng = np.random.default_rng(half)
    kills, round_ = 0, 0
    while kills < 25:
        folder = tmp_path / str(round_)
        round_ += 1
        while True:
            with start_child(folder) as child:
                try:
                    output, _ = child.communicate(timeout=rng.uniform(2.0, 12.0))
                except subprocess.TimeoutExpired:
                    child.kill()
                    kills += 1
                    continue
            assert child.returncode == 0
            break
        assert json.loads(output) == [20, int(checksum(raw(expected.state)))]
        assert without_clocks(read_metrics(folder)) == without_clocks(expected.metrics)
