"""Weights in and out, as safetensors under GPT-2's published names. Nothing is ever unpickled."""

from flax_gpt.pretrained.files import load_pretrained, save_pretrained
from flax_gpt.pretrained.names import from_gpt2_names, to_gpt2_names

__all__ = ["from_gpt2_names", "load_pretrained", "save_pretrained", "to_gpt2_names"]
