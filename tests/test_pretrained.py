"""Weights in and out: the published layout, byte for byte, and one clear error for what does not fit."""

import dataclasses
import json
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
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


@pytest.fixture
def shards(folder):
    """The folder's weights cut into three files and an index, as Hugging Face does with large ones."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i}-of-3.safetensors" for i in (1, 2, 3)]
    index = {name: names[i % 3] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensor for name, tensor in tensors.items() if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_shards_are_read_as_the_whole_file(shards):
    config, params = fg.load_pretrained(shards)
    assert config == CONFIG
    chex.assert_trees_all_equal(params, random_params(CONFIG))


def test_shards_that_are_missing_or_lack_a_tensor_are_named(shards):
    second, index = shards / "model-2-of-3.safetensors", shards / "model.safetensors.index.json"
    tensors = load_file(second)
    lost = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, second)
    with pytest.raises(ValueError, match=f"shards lack tensors .*\n  {lost} is not in model-2-of-3.safetensors$"):
        fg.load_pretrained(shards)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="index.json lists shards that are not there: model-2-of-3.safetensors"):
        fg.load_pretrained(shards)
    index.write_text(json.dumps({"weight_map": {"wte.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="must name files beside it, got ../elsewhere.safetensors"):
        fg.load_pretrained(shards)
    index.write_text("[]")
    with pytest.raises(ValueError, match="index.json is not an index of shards"):
        fg.load_pretrained(shards)


def test_a_tied_head_may_be_a_copy_or_stand_in_for_the_embedding_and_no_more(folder):
    expected = fg.load_pretrained(folder)[1]
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(folder / "model.safetensors").items()}
    wte = tensors.pop("wte.weight")
    chex.assert_trees_all_equal(from_gpt2_names(CONFIG, {**tensors, "lm_head.weight": wte}), expected)
    chex.assert_trees_all_equal(
        from_gpt2_names(CONFIG, {**tensors, "wte.weight": wte, "lm_head.weight": wte.copy()}), expected
    )
    other = wte.copy()
    other[12, 13] += 1e-6
    with pytest.raises(ValueError, match="lm_head.weight is not equal to wte.weight, .* set tie_word_embeddings to fa"):
        from_gpt2_names(CONFIG, {**tensors, "wte.weight": wte, "lm_head.weight": other})
    with pytest.raises(ValueError, match="lm_head.weight is not equal"):
        from_gpt2_names(CONFIG, {**tensors, "wte.weight": wte, "lm_head.weight": wte[:-1]})


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_every_dtype_is_read_into_every_other(folder, stored, dtype):
    rewrite(folder, lambda tensors: tensors.update({k: v.astype(jnp.dtype(stored)) for k, v in tensors.items()}))
    _, params = fg.load_pretrained(folder, dtype)
    kernel = random_params(CONFIG)["blocks"]["mlp"]["down"]["kernel"]
    expected = np.asarray(kernel).astype(jnp.dtype(stored))
    # Without x64 there is no float64 on a device.
    expected = expected.astype(jnp.dtype(dtype or {"float64": "float32"}.get(stored, stored)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {expected.dtype}
    np.testing.assert_array_equal(params["blocks"]["mlp"]["down"]["kernel"], expected)


def test_numbers_that_the_dtype_cannot_hold_are_an_error(folder):
    rewrite(folder, lambda tensors: tensors["transformer.h.1.ln_2.bias"].__setitem__(3, 1e5))
    with pytest.raises(ValueError, match="h.1.ln_2.bias holds numbers too large for float16"):
        fg.load_pretrained(folder, "float16")
    with pytest.raises(ValueError, match="must be of floating point, got int8"):
        fg.load_pretrained(folder, "int8")
    with pytest.raises(ValueError, match="JAX holds no float64 unless jax_enable_x64 is set"):
        fg.load_pretrained(folder, "float64")
    rewrite(folder, lambda tensors: tensors.update({"transformer.h.1.ln_2.bias": np.zeros(14, np.float16)}))
    with pytest.raises(ValueError, match="h.1.ln_2.bias holds float16 and h.0.ln_2.bias float32; give the dtype"):
        fg.load_pretrained(folder)
    rewrite(folder, lambda tensors: tensors.update({"transformer.h.1.ln_2.bias": np.zeros(14, np.int8)}))
    with pytest.raises(ValueError, match="h.1.ln_2.bias is stored as I8, not as one of F64, F32, F16, BF16"):
        fg.load_pretrained(folder)
    with pytest.raises(ValueError, match="h.1.ln_2.bias holds int8, no floating-point numbers"):
        from_gpt2_names(CONFIG, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_leaves_go_straight_to_where_they_are_wanted(tmp_path, qkv_bias):
    config = dataclasses.replace(CONFIG, qkv_bias=qkv_bias)
    params = random_params(config)
    fg.save_pretrained(tmp_path, config, params)
    second = SingleDeviceSharding(jax.devices()[1])
    loaded = fg.load_pretrained(tmp_path, sharding=second)[1]
    assert {leaf.sharding for leaf in jax.tree.leaves(loaded)} == {second}
    chex.assert_trees_all_equal(loaded, params)

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split, whole = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())
    wanted = {"wte": split, "wpe": None, "ln_f": whole, "blocks": {**dict.fromkeys(params["blocks"], whole)}}
    wanted["blocks"]["mlp"] = {"up": {"kernel": split, "bias": whole}, "down": whole}
    loaded = fg.load_pretrained(tmp_path, "bfloat16", wanted)[1]
    chex.assert_trees_all_equal(loaded, jax.tree.map(lambda x: x.astype("bfloat16"), params))
    assert loaded["wte"].sharding == loaded["blocks"]["mlp"]["up"]["kernel"].sharding == split
    assert loaded["wte"].addressable_shards[1].data.shape == (13, 7)
    assert loaded["blocks"]["attn"]["qkv"]["kernel"].sharding == loaded["ln_f"]["bias"].sharding == whole
    assert loaded["wpe"].devices() == {jax.devices()[0]}


def test_of_parameters_and_files_no_more_than_one_leaf_is_held(folder):
    """What has been read is dropped before the next leaf, and a leaf begins where JAX needs no copy of it."""
    alive = []

    def place(leaf, array):
        assert array.ctypes.data % 64 == 0
        assert not any(ref() is not None for ref in alive), leaf
        base = array
        while base.base is not None:
            base = base.base
        alive.append(weakref.ref(base))
        return leaf.shape

    from_gpt2_names(CONFIG, load_file(folder / "model.safetensors"), place=place)
    assert len(alive) == 16


def test_the_token_ids_of_a_config_are_those_of_its_vocabulary(folder):
    entries = json.loads((folder / "config.json").read_text())
    assert (entries["dtype"], entries["bos_token_id"], entries["eos_token_id"]) == ("float32", None, None)
    fg.save_pretrained(folder, CONFIG, random_params(CONFIG, jnp.bfloat16))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
