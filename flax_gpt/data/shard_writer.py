"""Writes token shards, so that a writer that died can be followed by another which goes on where it was.

Beside the shards (see `shards.py`) there are while it works

    progress.json         what is done: shards, how long the unfinished ones are, how far the input is read
    train-00002.bin.part  an unfinished shard; it may be longer than progress.json says, and is then cut back
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flax_gpt.data.documents import Position
from flax_gpt.data.shards import FORMAT, JOB_FILE, SHARDS_FILE, SPLITS
from flax_gpt.data.tokenizer import Tokenizer, describe_tokenizer

PROGRESS_FILE = "progress.json"
RECORD_EVERY = 1 << 26  # bytes of text; so much work is lost at most when the process is killed
ENDINGS = ("bin", "idx")

Shard = dict[str, Any]  # name, tokens, documents, characters, bytes: an entry of shards.json


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What a group adds to a part: ids and ends of documents in them, as they are written, and how much text it was."""

    ids: np.ndarray
    ends: np.ndarray
    characters: int
    bytes: int


class ShardWriter:
    """Shards as they are written, and the record of how far they are, from which a new writer of the folder goes on.

    Attributes:
        position: where reading is to go on.
    """

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self._folder, self._dtype, self._shard_tokens = folder, dtype, shard_tokens
        self.position = Position()
        self._done: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        self._open: dict[str, Shard] = {split: _new_shard(split, 0) for split in SPLITS}
        self._files: dict[tuple[str, str], BinaryIO] = {}
        self._unrecorded = 0
        if (folder / PROGRESS_FILE).exists():
            recorded = json.loads((folder / PROGRESS_FILE).read_text("utf-8"))
            self.position = Position(**recorded["position"])
            self._done, self._open = recorded["done"], recorded["open"]
        for shard in self._all_done():
            self._name_finished(shard)
        for split, shard in self._open.items():
            for ending, size in (("bin", dtype.itemsize * shard["tokens"]), ("idx", 8 * shard["documents"])):
                self._files[split, ending] = _open_part(folder / f"{shard['name']}.{ending}.part", size)

    def add(self, encoded: dict[str, Encoded], after: Position) -> None:
        """Writes what a group came to; afterwards reading is to go on at `after`."""
        full = False
        for split, part in encoded.items():
            shard = self._open[split]
            _write(self._files[split, "bin"], part.ids)
            _write(self._files[split, "idx"], part.ends + shard["tokens"])
            shard["tokens"] += len(part.ids)
            shard["documents"] += len(part.ends)
            shard["characters"] += part.characters
            shard["bytes"] += part.bytes
            self._unrecorded += part.bytes
            full |= shard["tokens"] >= self._shard_tokens
        self.position = after
        if full:
            self._close_shards(self._shard_tokens)
        elif self._unrecorded >= RECORD_EVERY:
            self._record()

    def _record(self) -> None:
        """Writes down what is done, once it is on the disk."""
        for file in self._files.values():
            _flush(file)
        self._unrecorded = 0
        entries = {"position": dataclasses.asdict(self.position), "done": self._done, "open": self._open}
        write_json(self._folder / PROGRESS_FILE, entries)

    def finish(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Closes the last shards and writes shards.json; returns what it says."""
        for split in SPLITS:
            if not self._done[split] and not self._open[split]["tokens"]:
                raise ValueError(
                    f"the {split} part would be empty; give more documents, other files to validate with, or another "
                    "fraction"
                )
        self._close_shards(1)
        entries = {
            "format": FORMAT,
            "tokenizer": describe_tokenizer(tokenizer)["kind"],
            "vocab_size": tokenizer.vocab_size,
            "dtype": self._dtype.name,
            "splits": self._done,
        }
        self.close()
        for shard in self._open.values():
            for ending in ENDINGS:
                (self._folder / f"{shard['name']}.{ending}.part").unlink()
        write_json(self._folder / SHARDS_FILE, entries)
        for name in (PROGRESS_FILE, JOB_FILE):
            (self._folder / name).unlink()
        return entries

    def close(self) -> None:
        """Closes the files, as they are."""
        for file in self._files.values():
            # What cannot be written here is not recorded either.
            with contextlib.suppress(OSError):
                file.close()

    def _close_shards(self, tokens: int) -> None:
        """Finishes the shards that have so many tokens, and begins the ones after them."""
        full = {split: shard for split, shard in self._open.items() if shard["tokens"] >= tokens}
        for split, shard in full.items():
            for ending in ENDINGS:
                _flush(self._files[split, ending])
                self._files[split, ending].close()
            self._done[split].append(shard)
            self._open[split] = new = _new_shard(split, len(self._done[split]))
            for ending in ENDINGS:
                self._files[split, ending] = _open_part(self._folder / f"{new['name']}.{ending}.part", 0)
        # Recorded first, named after: a run that dies between the two names them when it is resumed.
        self._record()
        for shard in full.values():
            self._name_finished(shard)

    def _name_finished(self, shard: Shard) -> None:
        for ending in ENDINGS:
            file = self._folder / f"{shard['name']}.{ending}"
            part = file.with_name(file.name + ".part")
            if part.exists():
                os.replace(part, file)
            elif not file.exists():
                raise ValueError(f"{file} is gone, so this cannot be resumed; remove {self._folder} and start anew")

    def _all_done(self) -> list[Shard]:
        return [shard for shards in self._done.values() for shard in shards]


def _new_shard(split: str, number: int) -> Shard:
    return {"name": f"{split}-{number:05}", "tokens": 0, "documents": 0, "characters": 0, "bytes": 0}


def _open_part(path: Path, size: int) -> BinaryIO:
    """An unfinished file to append to, cut back to a size."""
    path.touch()
    if path.stat().st_size < size:
        raise ValueError(
            f"{path} is shorter than recorded, so this cannot be resumed; remove {path.parent} and start anew"
        )
    os.truncate(path, size)
    return path.open("ab")


def _write(file: BinaryIO, values: np.ndarray) -> None:
    try:
        file.write(values.tobytes())
    except OSError as error:
        raise _cannot_write(error, file.name) from error


def _flush(file: BinaryIO) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _cannot_write(error, file.name) from error


def write_json(path: Path, entries: dict[str, Any]) -> None:
    """Writes a file as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(entries, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _cannot_write(error, path) from error


def _cannot_write(error: OSError, path: Any) -> OSError:
    return OSError(
        error.errno,
        f"cannot write {path}: {error.strerror}; what is done is kept, and the same command goes on from it",
    )
