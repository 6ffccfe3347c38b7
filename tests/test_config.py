"""The config: what it refuses, what it reads and writes, and that no field of it is idle."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny import CONFIG, random_params, random_tokens

from flax_gpt import GPTConfig, forward, init_params
from flax_gpt.config import PRESETS


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("vocab_size", 0, ValueError),
        ("n_positions", -3, ValueError),
        ("n_embd", 48.0, TypeError),
        ("n_layer", True, TypeError),
        ("n_head", "12", TypeError),
        ("n_inner", 0, ValueError),
        ("embd_pdrop", 1.0, ValueError),
        ("attn_pdrop", -0.1, ValueError),
        ("resid_pdrop", None, TypeError),
        ("layer_norm_epsilon", float("nan"), ValueError),
        ("layer_norm_epsilon", -1e-5, ValueError),
        ("initializer_range", float("inf"), ValueError),
        ("initializer_range", True, TypeError),
        ("tie_word_embeddings", 1, TypeError),
        ("qkv_bias", "yes", TypeError),
        ("activation_function", "swish", ValueError),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(field, value, error):
    with pytest.raises(error, match=rf"^{field} .*{value}"):
        GPTConfig(**{field: value})


def test_a_width_that_the_heads_do_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="n_embd=770 and n_head=12"):
        GPTConfig(n_embd=770)


def test_an_unknown_activation_function_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"gelu_new, gelu_pytorch_tanh, gelu, relu, linear.*'silu'"):
        GPTConfig(activation_function="silu")


def test_the_default_is_gpt2():
    config = GPTConfig()
    assert config == GPTConfig.preset("gpt2")
    assert (config.vocab_size, config.n_positions, config.n_embd) == (50257, 1024, 768)
    assert (config.head_width, config.mlp_width) == (64, 3072)
    assert (config.activation_function, config.layer_norm_epsilon) == ("gelu_new", 1e-5)


@pytest.mark.parametrize(("name", "sizes"), PRESETS.items())
def test_presets_have_their_sizes_and_heads_of_64(name, sizes):
    config = GPTConfig.preset(name, n_positions=32)
    assert (config.n_layer, config.n_head, config.n_embd) == tuple(sizes.values())
    assert (config.head_width, config.n_positions) == (64, 32)


def test_an_unknown_preset_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'gpt3'; the presets are gpt2, gpt2-medium, gpt2-large, gpt2-xl"):
        GPTConfig.preset("gpt3")


def test_a_config_is_immutable_and_equal_configs_hash_alike():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.n_layer = 3
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))


def test_a_config_survives_its_json_file(tmp_path):
    CONFIG.to_json(tmp_path / "config.json")
    assert GPTConfig.from_json(tmp_path / "config.json") == CONFIG
    entries = json.loads((tmp_path / "config.json").read_text())
    assert (entries["model_type"], entries["architectures"]) == ("gpt2", ["GPT2LMHeadModel"])


def test_entries_that_do_not_change_the_function_are_passed_over():
    entries = {"model_type": "gpt2", "n_layer": 3, "use_cache": True, "summary_type": "cls_index", "n_ctx": 1024}
    assert GPTConfig.from_dict(entries) == GPTConfig(n_layer=3)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("model_type", "llama"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("is_causal", False),
        ("quantization_config", 8),
        ("pruned_heads", 1),
        ("activation_function", "silu"),
    ],
)
def test_an_entry_that_asks_for_another_model_is_refused(entry, value):
    with pytest.raises(ValueError, match=f"{entry}.*{value!r}"):
        GPTConfig.from_dict({entry: value})


def test_hugging_faces_other_names_of_the_sizes_are_read():
    entries = {"hidden_size": 24, "max_position_embeddings": 7, "num_attention_heads": 3, "num_hidden_layers": 2}
    assert GPTConfig.from_dict(entries) == GPTConfig(n_embd=24, n_positions=7, n_head=3, n_layer=2)
    assert GPTConfig.from_dict({**entries, "n_head": 3}).n_head == 3
    with pytest.raises(ValueError, match="num_attention_heads=3 and n_head=4 contradict each other"):
        GPTConfig.from_dict({**entries, "n_head": 4})


@pytest.mark.parametrize(("content", "reason"), [(b"{", "not a JSON file"), (b"\xff", "not a JSON"), (b"[1]", "list")])
def test_a_file_that_holds_no_json_object_is_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json.*{reason}"):
        GPTConfig.from_json(path)


def test_a_missing_file_is_reported_as_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        GPTConfig.from_json(tmp_path / "config.json")


# What each field must change: the shapes of the parameters (path -> shape), fresh parameters of the same shapes, or the
# logits of the same parameters.
SHAPES = {
    "vocab_size": (67, {"wte": (67, 21)}),
    "n_positions": (19, {"wpe": (19, 21)}),
    "n_embd": (15, {"wte": (61, 15), "ln_f.scale": (15,), "blocks.attn.out.kernel": (2, 3, 5, 15)}),
    "n_layer": (5, {"blocks.ln_1.scale": (5, 21), "blocks.mlp.down.kernel": (5, 29, 21)}),
    "n_head": (7, {"blocks.attn.qkv.kernel": (2, 21, 3, 7, 3), "blocks.attn.out.kernel": (2, 7, 3, 21)}),
    "n_inner": (31, {"blocks.mlp.up.kernel": (2, 21, 31), "blocks.mlp.down.kernel": (2, 31, 21)}),
    "tie_word_embeddings": (False, {"head.kernel": (21, 61)}),
    "qkv_bias": (False, {"blocks.attn.qkv.bias": None}),
}
FRESH_PARAMETERS = {"initializer_range": 0.5}
LOGITS = {
    "activation_function": "gelu",
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
    "resid_pdrop": 0.5,
    "layer_norm_epsilon": 0.1,
}


def test_every_field_is_known_to_change_something():
    assert sorted([*SHAPES, *FRESH_PARAMETERS, *LOGITS]) == sorted(f.name for f in dataclasses.fields(GPTConfig))


def parameter_shapes(config):
    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in jax.tree.leaves_with_path(tree)
    }


@pytest.mark.parametrize(("field", "value", "shapes"), [(name, *change) for name, change in SHAPES.items()])
def test_a_size_changes_the_shapes_of_the_parameters(field, value, shapes):
    before = parameter_shapes(CONFIG)
    after = parameter_shapes(dataclasses.replace(CONFIG, **{field: value}))
    for path, shape in shapes.items():
        assert after.get(path) == shape
        assert before.get(path) != shape


@pytest.mark.parametrize(("field", "value"), FRESH_PARAMETERS.items())
def test_the_initializer_range_is_the_standard_deviation_of_fresh_parameters(field, value):
    params = init_params(dataclasses.replace(CONFIG, **{field: value}), jax.random.key(0))
    attn, mlp = params["blocks"]["attn"], params["blocks"]["mlp"]
    for leaf, std in [
        (params["wte"], value),
        (params["wpe"], value / 2),
        (attn["qkv"]["kernel"], value),
        (attn["out"]["kernel"], value / 2),  # 1 / sqrt(2 * n_layer) of it, for 2 layers
        (mlp["up"]["kernel"], value),
        (mlp["down"]["kernel"], value / 2),
    ]:
        assert abs(leaf.std() / std - 1) < 5 / np.sqrt(2 * leaf.size)


@pytest.fixture(scope="module")
def logits():
    """The logits of a config, the same parameters, tokens and dropout key each time."""
    params, tokens = random_params(), random_tokens()
    return lambda config: np.asarray(forward(config, params, tokens, dropout_key=jax.random.key(7)))


@pytest.mark.parametrize(("field", "value"), LOGITS.items())
def test_a_choice_changes_the_logits_of_the_same_parameters(logits, field, value):
    assert np.abs(logits(dataclasses.replace(CONFIG, **{field: value})) - logits(CONFIG)).max() > 1e-4
