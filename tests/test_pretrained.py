"""Weights in and out: the published layout, byte for byte, and one clear error for what does not fit."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flax_gpt as fg
from flax_gpt.pretrained import from_gpt2_names, to_gpt2_names

CONFIG = fg.GPTConfig(vocab_size=13, n_positions=11, n_embd=14, n_layer=3, n_head=2, n_inner=17)


def random_params(config, dtype=jnp.float32):
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: fg.init_params(config, jax.random.key(0))))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=leaf.shape), dtype) for leaf in leaves])


@pytest.fixture
def folder(tmp_path):
    fg.save_pretrained(tmp_path, CONFIG, random_params(CONFIG))
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_folder_round_trips_to_the_bit(tmp_path, tied, qkv_bias, dtype):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, qkv_bias=qkv_bias)
    params = random_params(config, dtype)
    fg.save_pretrained(tmp_path / "new" / "folder", config, params)
    loaded_config, loaded = fg.load_pretrained(tmp_path / "new" / "folder")
    assert loaded_config == config
    chex.assert_trees_all_equal(loaded, params)
    chex.assert_trees_all_equal_dtypes(loaded, params)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_tensors_have_gpt2s_names_and_layout():
    params = random_params(CONFIG)
    tensors = to_gpt2_names(CONFIG, params)
    assert len(tensors) == 2 + 12 * 3 + 2
    c_attn = tensors["transformer.h.1.attn.c_attn.weight"]
    assert c_attn.shape == (14, 42)
    # columns: queries, keys, values; head by head within each
    kernel = params["blocks"]["attn"]["qkv"]["kernel"]
    np.testing.assert_array_equal(c_attn[:, 14 + 7 : 14 + 14], kernel[1, :, 1, 1])
    # rows of c_proj: head by head
    np.testing.assert_array_equal(
        tensors["transformer.h.2.attn.c_proj.weight"][7:14], params["blocks"]["attn"]["out"]["kernel"][2, 1]
    )
    assert tensors["transformer.h.0.mlp.c_fc.weight"].shape == (14, 17)


def test_an_untied_head_is_stored_as_torch_stores_it():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    params = random_params(config)
    tensors = to_gpt2_names(config, params)
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["head"]["kernel"].T)


def test_published_files_without_prefix_and_with_masks_are_read(folder):
    expected = fg.load_pretrained(folder)[1]
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 11, 11), np.float32)
    bare["h.2.attn.masked_bias"] = np.float32(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"]
    chex.assert_trees_all_equal(jax.tree.map(jnp.asarray, from_gpt2_names(CONFIG, bare)), expected)


def test_the_dtype_can_be_chosen(folder):
    _, params = fg.load_pretrained(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_all_misfits_are_listed(folder):
    def change(tensors):
        del tensors["transformer.h.1.ln_1.bias"]
        del tensors["transformer.wte.weight"]
        tensors["transformer.h.3.ln_1.bias"] = np.zeros(14, np.float32)
        tensors["transformer.h.2.mlp.c_fc.weight"] = np.zeros((17, 14), np.float32)

    rewrite(folder, change)
    with pytest.raises(ValueError, match="do not fit the config") as caught:
        fg.load_pretrained(folder)
    for line in (
        r"missing: h.1.ln_1.bias (14,)",
        r"missing: wte.weight (13, 14)",
        "not of this model: h.3.ln_1.bias",
        "h.2.mlp.c_fc.weight has shape (17, 14), expected (14, 17)",
    ):
        assert line in str(caught.value)


def test_a_missing_untied_head_is_an_error_not_a_random_one(folder):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    config.to_json(folder / "config.json")
    with pytest.raises(ValueError, match=r"missing: lm_head.weight \(13, 14\)"):
        fg.load_pretrained(folder)


def test_a_bias_that_the_config_denies_is_refused(folder):
    dataclasses.replace(CONFIG, qkv_bias=False).to_json(folder / "config.json")
    with pytest.raises(ValueError, match="the config has qkv_bias=False"):
        fg.load_pretrained(folder)


def test_missing_and_broken_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match="no such folder: .*nowhere"):
        fg.load_pretrained(folder / "nowhere")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file, or not all of one"):
        fg.load_pretrained(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="no such file: .*model.safetensors"):
        fg.load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not a JSON file"):
        fg.load_pretrained(folder)


def test_hugging_face_opens_what_is_saved(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(CONFIG, n_head=2)
    params = random_params(config)
    fg.save_pretrained(tmp_path, config, params)
    model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    tokens = np.random.default_rng(0).integers(13, size=(3, 11))
    with torch.no_grad():
        logits = model.eval()(torch.tensor(tokens)).logits.numpy()
    # logits are of order 10 here: weights are N(0, 1)
    np.testing.assert_allclose(fg.forward(config, params, tokens), logits, rtol=1e-4, atol=1e-4)
