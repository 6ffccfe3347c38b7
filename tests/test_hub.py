"""Names on Hugging Face's hub: what is taken for one, what is asked of huggingface_hub, and what is said without it."""

import fnmatch
import importlib.util
import sys
import types

import chex
import jax
import pytest

import flax_gpt as fg
from flax_gpt.cli import main
from flax_gpt.pretrained import resolve_folder

CONFIG = fg.GPTConfig(vocab_size=13, n_positions=11, n_embd=14, n_layer=1, n_head=2)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands in for huggingface_hub: has one model under every name, or raises what it is told to; keeps the calls."""
    params = fg.init_params(CONFIG, jax.random.key(0))
    fg.save_pretrained(tmp_path / "cache", CONFIG, params)
    module = types.ModuleType("huggingface_hub")
    module.calls, module.error = [], None

    def snapshot_download(name, **options):
        module.calls.append((name, options))
        if module.error is not None:
            raise module.error
        return str(tmp_path / "cache")

    module.snapshot_download = snapshot_download
    module.params = params
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "huggingface_hub" or find(name))
    return module


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "openai-community/gpt2", "an_owner/a.name-2"])
def test_a_name_is_fetched_and_no_more_of_it_than_is_read(hub, name):
    config, params = fg.load_pretrained(name)
    assert config == CONFIG
    chex.assert_trees_all_equal(params, hub.params)
    ((asked, options),) = hub.calls
    assert asked == name
    patterns = options["allow_patterns"]
    assert {"config.json", "*.safetensors", "model.safetensors.index.json", "merges.txt"} < set(patterns)
    assert not any(fnmatch.fnmatch(file, pattern) for file in ("pytorch_model.bin", "onnx/x") for pattern in patterns)


def test_a_folder_goes_before_a_name(hub, tmp_path):
    fg.save_pretrained("gpt2", CONFIG, hub.params)
    assert resolve_folder("gpt2").samefile(tmp_path / "here" / "gpt2")
    assert not hub.calls


@pytest.mark.parametrize(
    "path", ["nowhere", "runs/nowhere", "/nowhere/else", "./a", "a/b/c", "../a", "a/", "file", "a b/c"]
)
def test_what_is_no_name_is_a_folder_that_is_missing(hub, tmp_path, path):
    (tmp_path / "here" / "runs").mkdir()
    (tmp_path / "here" / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=f"^no such folder: {path.removeprefix('./').rstrip('/')}$"):
        resolve_folder(path)
    assert not hub.calls


def test_without_huggingface_hub_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"no such folder: gpt2; to have gpt2 .*: pip install 'flax_gpt\[hf\]'"):
        fg.load_pretrained("gpt2")


def test_whatever_goes_wrong_there_is_one_error_that_names_the_model(hub, capsys):
    hub.error = RuntimeError("no route\nand a long story")
    message = r"no folder a/b, and a/b cannot be fetched .*\(RuntimeError: no route\)$"
    with pytest.raises(OSError, match=message):
        fg.load_pretrained("a/b")
    assert main(["eval", "a/b", "--data", "x.txt"]) == 1
    assert "a/b cannot be fetched from Hugging Face's hub" in capsys.readouterr().err


def test_huggingface_hubs_own_cache_is_read_offline(tmp_path, monkeypatch):
    """The real huggingface_hub, without a network: what is in its cache is found, and what is not is one error."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="openai-community/gpt2 cannot be fetched from Hugging Face's hub"):
        resolve_folder("openai-community/gpt2")
