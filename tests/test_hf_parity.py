"""Hugging Face's GPT2LMHeadModel as a second, foreign oracle: its stored results, and live where torch is installed."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from tiny import NO_DROPOUT

from flax_gpt import GPTConfig, forward, ops

FIXTURE = Path(__file__).parent / "fixtures" / "hf_gpt2.safetensors"
# Of logits of size 1 to 10, and of gradients relative to the largest entry of their tensor.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
LIVE_TOLERANCE = 1e-12


def from_hugging_face(state, config):
    """A GPT2LMHeadModel's tensors (weights, or gradients) as a tree of this package. No kernel is transposed."""
    d, h, k = config.n_embd, config.n_head, config.head_width

    def stacked(name, *shape):
        return np.stack([state[f"transformer.h.{i}.{name}"].reshape(shape) for i in range(config.n_layer)])

    def layer_norm(name):
        return {"scale": stacked(f"{name}.weight", d), "bias": stacked(f"{name}.bias", d)}

    f = config.mlp_width
    tree = {
        "wte": state["transformer.wte.weight"],
        "wpe": state["transformer.wpe.weight"],
        "blocks": {
            "ln_1": layer_norm("ln_1"),
            "attn": {
                "qkv": {
                    "kernel": stacked("attn.c_attn.weight", d, 3, h, k),
                    "bias": stacked("attn.c_attn.bias", 3, h, k),
                },
                "out": {"kernel": stacked("attn.c_proj.weight", h, k, d), "bias": stacked("attn.c_proj.bias", d)},
            },
            "ln_2": layer_norm("ln_2"),
            "mlp": {
                "up": {"kernel": stacked("mlp.c_fc.weight", d, f), "bias": stacked("mlp.c_fc.bias", f)},
                "down": {"kernel": stacked("mlp.c_proj.weight", f, d), "bias": stacked("mlp.c_proj.bias", d)},
            },
        },
        "ln_f": {"scale": state["transformer.ln_f.weight"], "bias": state["transformer.ln_f.bias"]},
    }
    if not config.tie_word_embeddings:
        tree["head"] = {"kernel": state["lm_head.weight"].T}
    return tree


@functools.partial(jax.jit, static_argnames=("config", "layers"))
def run(config, params, tokens, layers):
    """Loss, what led to it, and its gradient."""

    def loss(params):
        logits, acts = forward(config, params, tokens, capture=("embed", "resid_post", "ln_f"), layers=layers)
        return ops.cross_entropy(logits[:, :-1], tokens[:, 1:]).mean(), (logits, acts)

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_gradients_close(ours, theirs, tolerance):
    for (path, grad), expected in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(grad, expected, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def stored():
    with safe_open(FIXTURE, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["sizes"])  # noqa: SIM118


@pytest.mark.parametrize(
    ("kind", "layers", "dtype"),
    [
        ("tied", "scan", "float32"),
        ("tied", "scan", "float64"),
        ("tied", "unroll", "float32"),
        ("tied", "unroll", "float64"),
        ("untied", "unroll", "float32"),
        ("untied", "scan", "float64"),
    ],
)
def test_logits_states_loss_and_gradients_equal_the_stored_ones(stored, kind, layers, dtype):
    arrays, sizes = stored
    config = GPTConfig(**sizes, **NO_DROPOUT, tie_word_embeddings=kind == "tied")
    arrays = {name.removeprefix(f"{kind}/"): array for name, array in arrays.items() if name.startswith(f"{kind}/")}
    weights, gradients = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in ("weights/", "gradients/")
    )
    tolerance = TOLERANCE[dtype]
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), from_hugging_face(weights, config))
        (loss, (logits, acts)), grads = run(config, params, jnp.asarray(arrays["tokens"], jnp.int32), layers)
        assert logits.dtype == dtype
        np.testing.assert_allclose(logits, arrays["logits"], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(loss, arrays["loss"], rtol=tolerance)
        states = arrays["hidden_states"]  # the last block's output is there only after the final LayerNorm
        np.testing.assert_allclose(acts["embed"], states[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(acts["resid_post"][:-1], states[1:-1], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(acts["ln_f"], states[-1], rtol=tolerance, atol=tolerance)
        assert_gradients_close(grads, from_hugging_face(gradients, config), tolerance)


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is not this package's doing
@pytest.mark.parametrize(
    "fields",
    [
        {"n_layer": 1, "n_head": 1, "n_embd": 7, "n_inner": None, "activation_function": "gelu_new"},
        {"n_layer": 2, "n_head": 3, "n_embd": 33, "n_inner": 31, "activation_function": "gelu"},
        {"n_layer": 5, "n_head": 4, "n_embd": 20, "n_inner": 37, "activation_function": "relu"},
        {"n_layer": 2, "n_head": 1, "n_embd": 13, "activation_function": "gelu_pytorch_tanh"}
        | {"layer_norm_epsilon": 0.03, "tie_word_embeddings": False},
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_logits_and_gradients_equal_those_of_a_live_model(fields):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {"vocab_size": 43, "n_positions": 19, **NO_DROPOUT, **fields}
    config = GPTConfig(**fields)
    # The model's own config.json is all that ours is made from.
    theirs = transformers.GPT2Config(**fields)
    assert GPTConfig.from_dict(theirs.to_dict()) == config
    generator = torch.Generator().manual_seed(0)
    model = transformers.GPT2LMHeadModel(theirs).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    tokens = torch.randint(0, config.vocab_size, (2, 11), generator=generator)
    expected = model(tokens).logits
    torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    named = dict(model.named_parameters())
    with jax.enable_x64(True):
        weights = {name: parameter.detach().numpy() for name, parameter in named.items()}
        params = jax.tree.map(jnp.asarray, from_hugging_face(weights, config))
        (_, (logits, _)), grads = run(config, params, jnp.asarray(tokens.numpy(), jnp.int32), "scan")
        np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=LIVE_TOLERANCE, atol=LIVE_TOLERANCE)
        gradients = {name: parameter.grad.numpy() for name, parameter in named.items()}
        assert_gradients_close(grads, from_hugging_face(gradients, config), LIVE_TOLERANCE)
