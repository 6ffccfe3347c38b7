"""Text from a model: the key-value cache, sampling, generation at once or as a stream, beam search."""

from flax_gpt.generation.beam import Beams, beam_search
from flax_gpt.generation.cache import Cache, Weights, forward_cached, init_cache, prepare
from flax_gpt.generation.generate import Generation, generate
from flax_gpt.generation.sampling import Sampling, kept_tokens, make_sampling, sample
from flax_gpt.generation.stream import Stream, TextPieces, stream

__all__ = [
    "Beams",
    "Cache",
    "Generation",
    "Sampling",
    "Stream",
    "TextPieces",
    "Weights",
    "beam_search",
    "forward_cached",
    "generate",
    "init_cache",
    "kept_tokens",
    "make_sampling",
    "prepare",
    "sample",
    "stream",
]
