"""Linear probes find what is linearly there, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params, random_tokens

from flax_gpt import forward
from flax_gpt.interp import fit_probes, probe_accuracy, probe_logits

PARAMS = random_params()
TRAIN, TEST = random_tokens(shape=(40, 11), seed=1), random_tokens(shape=(20, 11), seed=2)


def test_a_class_that_is_linear_in_the_activation_is_read_off_it():
    directions = jax.random.normal(jax.random.key(0), (CONFIG.n_embd, 3))

    def labels(tokens):
        _, acts = forward(CONFIG, PARAMS, tokens, capture="resid_post")
        return jnp.argmax(acts["resid_post"][1] @ directions, axis=-1)

    probes = fit_probes(CONFIG, PARAMS, TRAIN, labels(TRAIN), 3, l2=1e-4)
    accuracy = probe_accuracy(CONFIG, PARAMS, TEST, labels(TEST), probes)
    assert accuracy.shape == (CONFIG.n_layer,)
    assert accuracy[1] > 0.93
    said = probe_logits(CONFIG, PARAMS, TEST, probes)
    assert said.shape == (CONFIG.n_layer, 20, 11, 3)
    assert float((said[1].argmax(-1) == labels(TEST)).mean()) == pytest.approx(float(accuracy[1]))


def test_random_labels_cannot_be_predicted():
    labels = jax.random.randint(jax.random.key(1), TRAIN.shape, 0, 4)
    probes = fit_probes(CONFIG, PARAMS, TRAIN, labels, 4)
    fresh = jax.random.randint(jax.random.key(2), TEST.shape, 0, 4)
    accuracy = probe_accuracy(CONFIG, PARAMS, TEST, fresh, probes)
    np.testing.assert_allclose(accuracy, 0.25, atol=0.12)


def test_the_fit_is_the_optimum_and_sees_what_is_scored_alone():
    labels = jax.random.randint(jax.random.key(1), TRAIN.shape, 0, 3)
    scored = jnp.arange(11) >= 4
    scored = jnp.broadcast_to(scored, TRAIN.shape)
    spoilt = jnp.where(scored, labels, 99)
    probes = fit_probes(CONFIG, PARAMS, TRAIN, spoilt, 3, site="mlp_out", scored=scored, l2=1e-2)
    _, acts = forward(CONFIG, PARAMS, TRAIN, capture="mlp_out")
    x = np.asarray(acts["mlp_out"][0], np.float64)[:, 4:].reshape(-1, CONFIG.n_embd)
    deviation = x.std(0)
    normal = (x - x.mean(0)) / deviation
    kernel = np.asarray(probes.kernel[0], np.float64) * deviation[:, None]
    bias = np.asarray(probes.bias[0], np.float64) + x.mean(0) @ np.asarray(probes.kernel[0], np.float64)
    scores = normal @ kernel + bias
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    error = (p - np.eye(3)[np.asarray(labels)[:, 4:].reshape(-1)]) / len(x)
    np.testing.assert_allclose(normal.T @ error + 2e-2 * kernel, 0, atol=2e-4)
    np.testing.assert_allclose(error.sum(0), 0, atol=2e-4)


def test_labels_that_are_no_classes_are_refused():
    with pytest.raises(ValueError, match="labels must be 0 to 2"):
        fit_probes(CONFIG, PARAMS, TRAIN, TRAIN, 3)
