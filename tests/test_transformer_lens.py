"""Every activation, site by site, equals what TransformerLens caches on the same weights; so does its patching."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from flax_gpt import SITES, GPTConfig, forward
from flax_gpt.interp import patch_sweep

THEIRS = load_file(Path(__file__).parent / "fixtures" / "transformer_lens.safetensors")
CONFIG = GPTConfig(61, 13, 21, 2, 3, 29, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, tie_word_embeddings=False)
HOOKS = {
    "resid_pre": "hook_resid_pre", "ln_1": "ln1.hook_normalized", "q": "attn.hook_q", "k": "attn.hook_k",
    "v": "attn.hook_v", "attn_scores": "attn.hook_attn_scores", "pattern": "attn.hook_pattern", "z": "attn.hook_z",
    "attn_out": "hook_attn_out", "resid_mid": "hook_resid_mid", "ln_2": "ln2.hook_normalized",
    "mlp_pre": "mlp.hook_pre", "mlp_post": "mlp.hook_post", "mlp_out": "hook_mlp_out", "resid_post": "hook_resid_post",
}  # fmt: skip
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def params():
    def stacked(name):
        return np.stack([THEIRS[f"weights/blocks.{i}.{name}"] for i in range(CONFIG.n_layer)])

    kernels = [stacked(f"attn.W_{name}").transpose(0, 2, 1, 3) for name in "QKV"]  # [l, d, h, k]
    biases = [stacked(f"attn.b_{name}") for name in "QKV"]
    tree = {
        "wte": THEIRS["weights/embed.W_E"],
        "wpe": THEIRS["weights/pos_embed.W_pos"],
        "blocks": {
            "ln_1": {"scale": stacked("ln1.w"), "bias": stacked("ln1.b")},
            "attn": {
                "qkv": {"kernel": np.stack(kernels, 2), "bias": np.stack(biases, 1)},
                "out": {"kernel": stacked("attn.W_O"), "bias": stacked("attn.b_O")},
            },
            "ln_2": {"scale": stacked("ln2.w"), "bias": stacked("ln2.b")},
            "mlp": {
                "up": {"kernel": stacked("mlp.W_in"), "bias": stacked("mlp.b_in")},
                "down": {"kernel": stacked("mlp.W_out"), "bias": stacked("mlp.b_out")},
            },
        },
        "ln_f": {"scale": THEIRS["weights/ln_final.w"], "bias": THEIRS["weights/ln_final.b"]},
        "head": {"kernel": THEIRS["weights/unembed.W_U"]},
    }
    return {name: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for name, leaf in tree.items()}


def scaled(norm, hook):
    """Their hook of a LayerNorm comes before scale and shift."""
    return THEIRS[f"cache/{hook}"] * THEIRS[f"weights/{norm}.w"] + THEIRS[f"weights/{norm}.b"]


def test_every_site_holds_what_its_hook_holds(params):
    logits, acts = forward(CONFIG, params, THEIRS["tokens"], capture=SITES)
    np.testing.assert_allclose(logits, THEIRS["logits"], rtol=1e-5, atol=3e-5)
    assert set(HOOKS) | {"embed", "ln_f", "logits"} == set(SITES)
    embed = THEIRS["cache/hook_embed"] + THEIRS["cache/hook_pos_embed"]
    np.testing.assert_allclose(acts["embed"], embed, **CLOSE)
    np.testing.assert_allclose(acts["ln_f"], scaled("ln_final", "ln_final.hook_normalized"), **CLOSE)
    seen = np.tri(THEIRS["tokens"].shape[1], dtype=bool)
    for site, hook in HOOKS.items():
        for layer in range(CONFIG.n_layer):
            ours = acts[site][layer]
            if site in ("ln_1", "ln_2"):
                theirs = scaled(f"blocks.{layer}.{hook[:3]}", f"blocks.{layer}.{hook}")
            else:
                theirs = THEIRS[f"cache/blocks.{layer}.{hook}"]
            if site == "attn_scores":  # theirs are -inf where ours are not masked yet
                ours, theirs = ours[..., seen], theirs[..., seen]
            np.testing.assert_allclose(ours, theirs, **CLOSE, err_msg=f"{site} of layer {layer}")


def test_patching_every_head_gives_what_theirs_gives(params):
    found = patch_sweep(
        CONFIG, params, THEIRS["tokens"], THEIRS["source"], lambda logits: (logits[:, 5] - logits[:, 7]).sum(), at=-1
    )
    np.testing.assert_allclose(found, THEIRS["patched"], rtol=1e-5, atol=1e-4)
