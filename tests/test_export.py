"""Exported programs: saved, and run in a process that has only JAX, on batches and lengths of its own."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from tiny import CONFIG, random_params, random_tokens

import flax_gpt as fg
from flax_gpt.generation import prepare

PARAMS = random_params()


@pytest.fixture(autouse=True)
def unchecked():
    """No annotation holds for a symbolic size."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


ELSEWHERE = """
import pickle, sys
import jax.export, numpy as np
with open(sys.argv[1], "rb") as file:
    programs, arguments = pickle.load(file)
forward, step = (jax.export.deserialize(program) for program in programs)
params, weights, token_batches = arguments
logits = [np.asarray(forward.call(params, tokens)) for tokens in token_batches]
tokens = token_batches[0]
b, t = tokens.shape
h, k = weights["blocks"][0]["attn"]["out"]["kernel"].shape[:2]
zeros = lambda: tuple(np.zeros((b, h, k, t + 2), np.float32) for _ in weights["blocks"])
cache = {"keys": zeros(), "values": zeros(), "mask": np.zeros((b, t + 2), bool), "length": np.int32(0)}
steps = []
for i in range(t):
    out, cache = step.call(weights, tokens[:, i], cache)
    steps.append(np.asarray(out))
assert not {"flax", "flax_gpt"} & set(sys.modules)
with open(sys.argv[2], "wb") as file:
    pickle.dump((logits, np.stack(steps, 1)), file)
"""


def test_another_process_with_only_jax_gets_the_same_numbers(tmp_path):
    import pickle

    batches = [np.asarray(random_tokens(shape=shape)) for shape in ((2, 11), (3, 1), (1, 17))]
    programs = [fg.export.export_forward(CONFIG).serialize(), fg.export.export_decode_step(CONFIG).serialize()]
    arrays = jax.tree.map(np.asarray, (PARAMS, prepare(CONFIG, PARAMS, transposed=False)._asdict()))
    (tmp_path / "in").write_bytes(pickle.dumps((programs, (*arrays, batches))))
    subprocess.run([sys.executable, "-c", ELSEWHERE, tmp_path / "in", tmp_path / "out"], check=True, cwd=tmp_path)
    logits, steps = pickle.loads((tmp_path / "out").read_bytes())
    for tokens, found in zip(batches, logits, strict=True):
        expected = fg.forward(CONFIG, PARAMS, tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    expected = fg.forward(CONFIG, PARAMS, batches[0])
    np.testing.assert_allclose(steps, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_it_is_exported_for_every_platform_and_dtype():
    program = fg.export.export_decode_step(CONFIG, compute_dtype=jnp.bfloat16)
    assert program.platforms == ("cpu", "cuda", "tpu")
    dtypes = {str(aval.dtype) for aval in program.in_avals}
    assert dtypes == {"float32", "bfloat16", "int32", "bool"}
    assert fg.export.export_forward(CONFIG, platforms=["cpu"]).platforms == ("cpu",)


def test_a_sequence_above_n_positions_is_refused():
    program = fg.export.export_forward(CONFIG, platforms=["cpu"])
    with pytest.raises(ValueError, match="t <= 17"):
        program.call(PARAMS, jnp.zeros((1, 18), jnp.int32))
