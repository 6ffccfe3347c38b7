"""The files of a byte-level BPE: OpenAI's vocab.bpe and encoder.json, and Hugging Face's names and form of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
# Where merges are looked for in a folder, in this order, and what the first two may have beside them.
MERGES_FILES = ("vocab.bpe", "merges.txt", "tokenizer.json")
VOCABULARY_FILES = ("encoder.json", "vocab.json")


@functools.lru_cache(maxsize=4)
def merge_ranks(merges: str) -> dict[bytes, int]:
    """The ids of all tokens but the end of text: the 256 bytes in GPT-2's order, then a token a merge.

    Raises:
        ValueError: a line is not a pair of tokens in GPT-2's spelling of bytes.
    """
    spelling = _spelling()
    ranks = {bytes([byte]): i for i, byte in enumerate(spelling.values())}
    for number, line in enumerate(merges.split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        try:
            first, second = line.rstrip("\r").split(" ")
            ranks[bytes(spelling[character] for character in first + second)] = len(ranks)
        except (ValueError, KeyError):
            raise ValueError(f"line {number} is not a pair of tokens: {line[:40]!r}") from None
    return ranks


def vocabulary(merges: str) -> dict[str, int]:
    """The ids of all tokens, spelt as in the files, in order; the end of text is the last. This is encoder.json."""
    characters = {byte: character for character, byte in _spelling().items()}
    ranks = {"".join(characters[byte] for byte in token): rank for token, rank in merge_ranks(merges).items()}
    return {**ranks, END_OF_TEXT: len(ranks)}


@functools.cache
def _spelling() -> dict[str, int]:
    """Character -> byte, in the order of the bytes' ids.

    Bytes that can be seen are spelt as themselves, the others as the characters from U+0100 on.
    """
    seen = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def read_merges(path: str | Path) -> tuple[Path, str]:
    """The merges of a file, or of the first of vocab.bpe, merges.txt and tokenizer.json in a folder.

    In a folder an encoder.json or vocab.json must have the ids that the merges make. So must a tokenizer.json itself,
    and it must split a text as GPT-2 does.

    Returns:
        The file, and a pair to merge a line, as in vocab.bpe.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no merges, or the ids are others, or the text is changed or split otherwise.
    """
    path = Path(path)
    files = [path / name for name in MERGES_FILES] if path.is_dir() else [path]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"no GPT-2 merges: there is no {' or '.join(map(str, files))}")
    if file.suffix == ".json":
        return file, _merges_of_tokenizer_json(file)
    merges = file.read_text("utf-8")
    for other in (path / name for name in VOCABULARY_FILES if path.is_dir()):
        if other.is_file():
            try:
                expected = vocabulary(merges)
            except ValueError as error:
                raise ValueError(f"{file} does not hold GPT-2's merges: {error}") from error
            _check_ids(other, _read_json(other), expected, file)
    return file, merges


def has_merges(folder: str | Path) -> bool:
    """Whether a folder holds one of the files that `read_merges` looks for."""
    return any(Path(folder, name).is_file() for name in MERGES_FILES)


def write_gpt2_files(folder: str | Path, merges: str, n_positions: int) -> None:
    """Writes vocab.json, merges.txt and tokenizer_config.json, from which Hugging Face's `AutoTokenizer` is made."""
    folder = Path(folder)
    entries = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": n_positions,
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary(merges)), "utf-8")
    (folder / "merges.txt").write_bytes(merges.encode("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(entries, indent=2) + "\n", "utf-8")


def _merges_of_tokenizer_json(file: Path) -> str:
    entries = _read_json(file)
    model = entries.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("merges"), list):
        raise ValueError(f"{file} describes no BPE with merges")
    splits = entries.get("pre_tokenizer") or {}
    expected = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if wrong := {name: splits.get(name) for name, value in expected.items() if splits.get(name, value) != value}:
        raise ValueError(f"{file} splits a text in another way than GPT-2's {expected}: its pre_tokenizer has {wrong}")
    if "type" not in splits or entries.get("normalizer") is not None:
        raise ValueError(f"{file} must have a ByteLevel pre_tokenizer and no normalizer, as GPT-2's")
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    merges = "\n".join(["#version: 0.2", *pairs, ""])
    try:
        ids = vocabulary(merges)
    except ValueError as error:
        raise ValueError(f"{file} does not hold GPT-2's merges: {error}") from error
    added = {token["content"]: token["id"] for token in entries.get("added_tokens") or []}
    _check_ids(file, {**model.get("vocab", {}), **added}, ids, file)
    return merges


def _check_ids(file: Path, found: Mapping[str, Any], expected: Mapping[str, int], source: Path) -> None:
    """Raises ValueError where a vocabulary is not the one that the merges make."""
    for token in (*expected, *found):
        if found.get(token) != expected.get(token):
            raise ValueError(
                f"{file} does not have the ids that the merges in {source} make: {token!r} is {found.get(token)} in it "
                f"and {expected.get(token)} by the merges"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(entries).__name__}")
    return entries
