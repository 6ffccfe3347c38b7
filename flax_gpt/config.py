"""The one description of a GPT-2: its sizes, its dropout rates and the few choices its maths leaves open.

Fields carry the names of Hugging Face's `GPT2Config`, so that a `config.json` needs no translation.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "linear")

PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124,439,808 parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 354,823,168
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774,030,080
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1,557,611,200
}

# Entries of Hugging Face's config.json that change the function, with the value that GPT-2 has. Any other is refused:
# reading past it would give another model's weights GPT-2's maths. (`reorder_and_upcast_attn` is not among them: it
# asks for float32 attention scores, and they always are.)
_FIXED_BY_GPT2 = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "is_causal": True,
    "quantization_config": None,
    "pruned_heads": {},
}
# Names that Hugging Face takes for some of the fields as well.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Hyper-parameters of a GPT-2; hashable, so that it can be a static argument of `jax.jit`.

    Attributes:
        vocab_size: number of tokens, v.
        n_positions: longest sequence, the length of the table of learned positions.
        n_embd: width of the model, d.
        n_layer: number of blocks, l.
        n_head: number of attention heads, h; divides n_embd.
        n_inner: width of the MLP's hidden layer, f; None means 4 * n_embd.
        activation_function: the MLP's non-linearity. GPT-2's is "gelu_new", the tanh approximation of GELU
            ("gelu_pytorch_tanh" is another name of the same function); "gelu" is the exact one, "relu" and
            "linear" (no non-linearity at all) are ablations.
        embd_pdrop: dropout rate of the sum of the embeddings.
        attn_pdrop: dropout rate of the attention pattern.
        resid_pdrop: dropout rate of what attention and MLP add to the residual stream.
        layer_norm_epsilon: added to the variance in every LayerNorm.
        initializer_range: standard deviation of a fresh matrix. GPT-2's 0.02 is meant for widths near 1000: a model 64
            wide may learn nothing from it, and 1/sqrt(n_embd) is the better choice there.
        tie_word_embeddings: whether the logits are read off the token embedding, as in GPT-2, or a head of their own.
        qkv_bias: whether queries, keys and values have a bias, as in GPT-2.

    Raises:
        TypeError, ValueError: a field is not of its type or out of its range; the message names it and its value.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    qkv_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            value = getattr(self, name)
            if name == "n_inner" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop", "layer_norm_epsilon", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a float, got {value!r}")
            if name.endswith("pdrop") and not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name in ("tie_word_embeddings", "qkv_bias"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be divisible by n_head, got n_embd={self.n_embd} and n_head={self.n_head}")
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function must be one of {', '.join(ACTIVATIONS)}, got {self.activation_function!r}"
            )

    @property
    def head_width(self) -> int:
        """Width of one head, k = n_embd / n_head."""
        return self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """Width of the MLP's hidden layer, f: n_inner, or 4 * n_embd where that is None."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """The config of a published GPT-2: gpt2, gpt2-medium, gpt2-large or gpt2-xl, with fields changed by name.

        Raises:
            ValueError: the name is none of these; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> GPTConfig:
        """The config that Hugging Face's `config.json` describes.

        Entries that do not change the function (of generation, say, or of classification heads) are passed over.

        Raises:
            ValueError: an entry asks for something that GPT-2 as it is here does not do, or two contradict each other;
                the message names it.
        """
        for alias, name in _ALIASES.items():
            if alias in entries:
                if entries.get(name, entries[alias]) != entries[alias]:
                    raise ValueError(f"{alias}={entries[alias]!r} and {name}={entries[name]!r} contradict each other")
                entries = {**entries, name: entries[alias]}
        for name, expected in _FIXED_BY_GPT2.items():
            if entries.get(name, expected) != expected:
                raise ValueError(f"{name}={entries[name]!r} is not supported, only {name}={expected!r}")
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in entries.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """The entries of a `config.json` that Hugging Face's `GPT2LMHeadModel` reads."""
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, path: str | Path) -> GPTConfig:
        """Reads a `config.json`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a JSON object, or see `from_dict`.
        """
        try:
            entries = json.loads(Path(path).read_text("utf-8"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise ValueError(f"{path} is not a JSON file: {error}") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(entries).__name__}")
        return cls.from_dict(entries)

    def to_json(self, path: str | Path) -> None:
        """Writes a `config.json`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", "utf-8")
