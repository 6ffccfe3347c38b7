"""Path patching, against the two runs written out, and on a model whose only path is known."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params, random_tokens

from flax_gpt import forward
from flax_gpt.interp import path_patch

PARAMS = random_params()
TOKENS, SOURCE = random_tokens(seed=1), random_tokens(seed=2)
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
L, H = CONFIG.n_layer, CONFIG.n_head


def last_logits(logits):
    return logits[:, -1, :5]


def by_hand(sender, receiver, freeze_mlps):
    """The metric of one sender and one receiver."""
    (layer_s, head_s), (site, layer_r, head_r) = sender, receiver
    _, plain = forward(CONFIG, PARAMS, TOKENS, capture=("z", "mlp_out"))
    _, other = forward(CONFIG, PARAMS, SOURCE, capture="z")

    def send(at, layer, value):
        if at == "z":
            value = plain["z"][layer]
            return value.at[:, :, head_s].set(other["z"][layer][:, :, head_s]) if layer == layer_s else value
        return plain["mlp_out"][layer] if freeze_mlps and at == "mlp_out" else value

    _, received = forward(CONFIG, PARAMS, TOKENS, capture=site, edit=send, layers="unroll")

    def receive(at, layer, value):
        if at != site or layer != layer_r:
            return value
        new = received[site][layer_r]
        return new if head_r is None else value.at[:, :, head_r].set(new[:, :, head_r])

    return last_logits(forward(CONFIG, PARAMS, TOKENS, edit=receive, layers="unroll"))


@pytest.mark.parametrize("freeze_mlps", [False, True])
@pytest.mark.parametrize("receiver", [("k", 1, 2), ("resid_post", 1, None)])
def test_each_sender_is_what_two_runs_by_hand_give(receiver, freeze_mlps):
    found = path_patch(CONFIG, PARAMS, TOKENS, SOURCE, last_logits, [receiver], freeze_mlps=freeze_mlps)
    assert found.shape[:2] == (L, H)
    for sender in np.ndindex(L, H):
        np.testing.assert_allclose(found[sender], by_hand(sender, receiver, freeze_mlps), **CLOSE)


def test_senders_that_are_not_before_the_receiver_change_nothing():
    found = path_patch(CONFIG, PARAMS, TOKENS, SOURCE, lambda x: x[:, :5], [("q", 1, 0), ("k", 1, 0)], at=-1)
    plain = last_logits(forward(CONFIG, PARAMS, TOKENS))
    np.testing.assert_allclose(found[1], jnp.broadcast_to(plain, found[1].shape), **CLOSE)
    assert float(jnp.abs(found[0] - plain).min(axis=(1, 2)).max()) > 1e-4


@pytest.mark.parametrize(
    ("receivers", "message"),
    [
        ([], "at least one receiver"),
        ([("k", 2, 0)], "layers 0 to 1"),
        ([("k", 1, 3)], "heads 0 to 2"),
        ([("mlp_out", 1, 0)], "has no heads"),
    ],
)
def test_a_receiver_that_does_not_exist_is_named(receivers, message):
    with pytest.raises(ValueError, match=message):
        path_patch(CONFIG, PARAMS, TOKENS, SOURCE, last_logits, receivers)
