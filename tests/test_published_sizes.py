"""The four published sizes, by their shapes: random weights in shards are read, and gpt2-xl's in little memory."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import flax_gpt as fg
from flax_gpt.pretrained.names import published_leaves

BLOCK = np.random.default_rng(0).normal(0, 0.02, 1_000_003).astype(np.float32)

# In a process of its own, whose peak is that of loading alone. Each tensor begins at another place of the same block.
LOAD = """
import sys
import jax
import numpy as np
import flax_gpt as fg

folder, dtype = sys.argv[1:]
config, params = fg.load_pretrained(folder, None if dtype == "None" else dtype)
assert sum(leaf.size for leaf in jax.tree.leaves(params)) == fg.count_params(config)
assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32" if dtype == "None" else dtype}
block = np.random.default_rng(0).normal(0, 0.02, 1_000_003).astype(np.float32)
last = config.n_layer - 1
for place, leaf in ((0, params["wte"]), (last * 12 + 4, params["blocks"]["attn"]["qkv"]["kernel"][last])):
    np.testing.assert_array_equal(np.asarray(leaf).ravel()[:9], block[place : place + 9].astype(leaf.dtype))
with open("/proc/self/status") as file:
    print(next(line for line in file if line.startswith("VmHWM")).split()[1])
"""


def write_shards(folder, config):
    """A folder of weights as the hub has them, a layer a shard; returns its size in bytes."""
    shapes = {name: leaf.stored for leaf in published_leaves(config) for name in leaf.names}
    places = {"wte.weight": 0}
    for layer in range(config.n_layer):
        names = [name for name in shapes if name.startswith(f"h.{layer}.")]
        places |= {name: layer * 12 + i for i, name in enumerate(names, 2)}
    shards = {}
    for name in shapes:
        shards.setdefault(name.split(".")[1] if name.startswith("h.") else "rest", []).append(name)
    for shard, names in shards.items():
        tensors = {name: np.resize(BLOCK[places.get(name, 1) :], shapes[name]) for name in names}
        save_file(tensors, folder / f"model-{shard}.safetensors")
    index = {name: f"model-{shard}.safetensors" for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.to_json(folder / "config.json")
    return 4 * sum(math.prod(shape) for shape in shapes.values())


def peak_of_loading(folder, dtype=None):
    """Bytes that a process took which loaded a folder."""
    done = subprocess.run([sys.executable, "-c", LOAD, folder, str(dtype)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak from /proc")
@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_a_published_size_is_read_from_shards_in_little_more_memory_than_it_has(tmp_path, name):
    size = write_shards(tmp_path, fg.GPTConfig.preset(name))
    try:
        peak, cast = peak_of_loading(tmp_path), peak_of_loading(tmp_path, "bfloat16")
    finally:
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
    print(f"{name}: {size / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, as bfloat16 {cast / 1e9:.2f} GB")
    if name == "gpt2-xl":  # beside which what Python and JAX take themselves is little
        assert peak < 1.3 * size
        assert cast < 0.7 * size
