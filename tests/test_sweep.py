"""Many trainings in one program come to what each comes to alone."""

import csv
import dataclasses

import chex
import jax
import numpy as np
import pytest
from counting import CONFIG as PLAIN
from counting import TRAIN, Counting

from flax_gpt import training

CONFIG = dataclasses.replace(PLAIN, embd_pdrop=0.1, resid_pdrop=0.1, initializer_range=0.2)
TWENTY = dataclasses.replace(TRAIN, steps=20, lr=1e-2, weight_decay=0.1)
VARIED = {
    "seed": [1, 2, 3, 4],
    "lr": [1e-2, 2e-2, 5e-3, 1e-2],
    "weight_decay": [0.1, 0.0, 0.5, 1.0],
    "initializer_range": [0.2, 0.2, 0.1, 0.1],
}


@pytest.fixture(scope="module", params=["map", pytest.param("vmap", marks=pytest.mark.slow)])
def sweep(request):
    """Spread over the two devices of the tests."""
    return training.fit_many(CONFIG, TWENTY, Counting(), **VARIED, layout=request.param)


def without_noise(params):
    """Less the bias of the keys, whose gradient is nothing but rounding, which Adam makes steps of."""
    qkv = params["blocks"]["attn"]["qkv"]
    qkv = {**qkv, "bias": np.delete(np.asarray(qkv["bias"]), 1, axis=1)}
    attn = {**params["blocks"]["attn"], "qkv": qkv}
    return {**params, "blocks": {**params["blocks"], "attn": attn}}


@pytest.fixture(scope="module")
def alone():
    """The last member, by itself."""
    results = {}
    for index in (3,):
        values = {name: values[index] for name, values in VARIED.items()}
        config = dataclasses.replace(CONFIG, initializer_range=values.pop("initializer_range"))
        train = dataclasses.replace(TWENTY, **values)
        results[index] = (config, train), training.fit(config, train, Counting())
    return results


def test_each_member_is_the_run_of_its_own(sweep, alone):
    for index, (member, result) in alone.items():
        assert sweep.members[index] == member
        chex.assert_trees_all_close(
            without_noise(sweep.params(index)), without_noise(result.params), rtol=1e-6, atol=1e-6
        )
        for line, expected in zip(sweep.metrics[index], result.metrics, strict=True):
            for name, value in line.items():
                if name not in ("seconds", "update_norm", "update_norm/attn"):  # the noise again
                    np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_table_and_the_curves_are_written(sweep, tmp_path):
    sweep.write(tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lr"]) for row in rows] == VARIED["lr"]
    for row, lines in zip(rows, sweep.metrics, strict=True):
        assert float(row["val_loss"]) == lines[-1]["val_loss"]
        assert float(row["best_val_loss"]) == min(line["val_loss"] for line in lines if "val_loss" in line)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert sweep.names()[1] == "seed=2, lr=0.02, weight_decay=0, initializer_range=0.2"


@pytest.mark.slow
def test_a_member_that_fails_leaves_the_others_alone():
    class Broken(Counting):
        def training_batch(self, seed, step, batch_size):
            batch = super().training_batch(seed, step, batch_size)
            return batch._replace(targets=batch.targets + 7 * (seed == 2 and step > 3))

    short = dataclasses.replace(TWENTY, steps=8)
    broken = training.fit_many(CONFIG, short, Broken(), seed=[1, 2])
    assert [row["skipped"] for row in broken.table()] == [0, 4]
    whole = training.fit_many(CONFIG, short, Counting(), seed=[1, 2])
    chex.assert_trees_all_equal(broken.params(0), whole.params(0))
    chex.assert_tree_all_finite(jax.tree.map(np.asarray, broken.params(1)))


@pytest.mark.parametrize(
    ("varied", "message"),
    [
        ({}, r"give lists of one length for what the members differ in; got lengths \{\}"),
        ({"seed": [1, 2], "lr": [0.1]}, r"got lengths \{'seed': 2, 'lr': 1\}"),
        ({"lr": [1e-2, 1e-5]}, "min_lr must not be above lr, got min_lr=0.0001 and lr=1e-05"),
    ],
)
def test_impossible_sweeps_are_refused(varied, message):
    with pytest.raises(ValueError, match=message):
        training.fit_many(CONFIG, TWENTY, Counting(), **varied)
