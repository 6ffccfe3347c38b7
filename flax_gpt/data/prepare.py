"""Turns texts of any size into token shards: in parallel, in little memory, and so that a killed run can be resumed.

While it works, the folder holds beside what `shard_writer.py` writes

    prepare.json    what is being made, of which files; another job is refused
    prepare.lock    locked by the process at work
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flax_gpt.data.documents import Group, Position, Span, list_spans, read_groups
from flax_gpt.data.prefetch import prefetch
from flax_gpt.data.shard_writer import PROGRESS_FILE, Encoded, ShardWriter, write_json
from flax_gpt.data.shards import FORMAT, JOB_FILE, SHARDS_FILE, SPLITS
from flax_gpt.data.tokenizer import (
    FILE_NAME,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    describe_tokenizer,
    load_tokenizer,
)

LOCK_FILE = "prepare.lock"

Report = Callable[[int, int], None]


def prepare(
    inputs: Sequence[str | Path],
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    validation: Sequence[str | Path] = (),
    validation_fraction: float = 0.1,
    field: str = "text",
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Writes token shards; started again with the same arguments after a crash, it goes on where it was.

    A text file is a document, a .jsonl file has one a line. After each comes the tokenizer's `end_of_text`, where it
    has one. Of a single text file the last part is to validate with, of several documents one in every
    1 / validation_fraction.

    Args:
        inputs: files, and folders of which all files but the hidden ones are taken.
        folder: to write to; made where it is not there.
        tokenizer: one of this package's; None makes a `CharTokenizer` of the characters that occur.
        validation: files and folders to validate with, instead of a part of the inputs.
        validation_fraction: above 0, at most 0.5.
        field: of the objects in .jsonl files, the one with the text.
        shard_tokens: a shard is closed when it has so many.
        workers: threads; None is one a processor, at most 8.
        report: called with the bytes of text read so far and those there are.

    Returns:
        What shards.json says.

    Raises:
        FileNotFoundError: there is nothing at an input's path.
        FileExistsError: the folder is finished, or another process is writing to it.
        ValueError: a file is not what it should be (see `read_groups`), a part would be empty, or the folder holds the
            beginnings of another job (the message says what differs).
        OSError: a file cannot be read or written. What is done is kept, unless the folder itself is the trouble.
    """
    if not 0 < validation_fraction <= 0.5 or shard_tokens < 1 or (workers is not None and workers < 1):
        raise ValueError(
            "validation_fraction must be above 0 and at most 0.5, shard_tokens and workers at least 1, got "
            f"{validation_fraction}, {shard_tokens} and {workers}"
        )
    folder = Path(folder)
    spans = list_spans([Path(path) for path in inputs], [Path(path) for path in validation], validation_fraction)
    if not spans:
        raise ValueError("nothing to prepare: no input is given")
    around = [folder.resolve(), *folder.resolve().parents]
    if any(Path(path).is_dir() and Path(path).resolve() in around for path in (*inputs, *validation)):
        raise ValueError(f"{folder} lies within an input; give a folder outside of what is read")
    _refuse_foreign(folder)
    options = {"validation_fraction": validation_fraction, "field": field, "shard_tokens": shard_tokens}
    described = {"kind": "char"} if tokenizer is None else describe_tokenizer(tokenizer)
    with _claim(folder):
        _check_job(folder, {"format": FORMAT, "tokenizer": described, **options, "files": _fingerprints(spans)})
        if tokenizer is None:
            tokenizer = _alphabet(folder, spans, validation_fraction, field)
        write_json(folder / FILE_NAME, describe_tokenizer(tokenizer))
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

        def encode(group: Group) -> tuple[Position, dict[str, Encoded]]:
            return group.after, encode_group(group, tokenizer, dtype)

        cut_anywhere = isinstance(tokenizer, ByteTokenizer | CharTokenizer)
        until = [0, *itertools.accumulate(span.stop - span.start for span in spans)]
        with contextlib.closing(ShardWriter(folder, dtype, shard_tokens)) as writer:
            groups = read_groups(spans, writer.position, validation_fraction, field, cut_anywhere)
            # Threads are enough: tiktoken and NumPy let go of the interpreter's lock, and a process would import JAX
            # anew. Two groups a thread at most are in memory.
            threads = workers or _usable_cores()
            with contextlib.closing(prefetch(encode, groups, ahead=2 * threads - 1, workers=threads)) as results:
                for after, encoded in results:
                    writer.add(encoded, after)
                    if report is not None:
                        within = after.offset - spans[after.span].start if after.span < len(spans) else 0
                        report(until[after.span] + within, until[-1])
            return writer.finish(tokenizer)


def encode_group(group: Group, tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, Encoded]:
    """The ids of a group's pieces, by part; after each document the tokenizer's `end_of_text`, where it has one."""
    end_of_text = getattr(tokenizer, "end_of_text", None)
    tail = np.empty(0, dtype) if end_of_text is None else np.array([end_of_text], dtype)
    encoded = {}
    for split in SPLITS:
        pieces = [piece for piece in group.pieces if piece.split == split]
        if not pieces:
            continue
        ids, ends, n = [], [], 0
        for piece in pieces:
            ids.append(tokenizer.encode(piece.text).astype(dtype))
            n += len(ids[-1])
            if piece.ends_document:
                ids.append(tail)
                n += len(tail)
                ends.append(n)
        encoded[split] = Encoded(
            np.concatenate(ids),
            np.array(ends, "<i8"),
            sum(len(piece.text) for piece in pieces),
            sum(piece.size for piece in pieces),
        )
    return encoded


@contextlib.contextmanager
def _claim(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes out of it while this one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with path.open("a") as lock:
        try:
            import fcntl
        except ImportError:  # Windows: one has to see to it oneself
            yield
            return
        try:
            # Unlike a file that is there or not, a lock goes with its process, however that ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another process is writing to {folder}") from None
        _refuse_foreign(folder)  # again: now nobody else can change it
        yield
    if (folder / SHARDS_FILE).exists():
        path.unlink(missing_ok=True)


def _refuse_foreign(folder: Path) -> None:
    """Raises FileExistsError where a folder holds anything but an unfinished job."""
    if (folder / SHARDS_FILE).exists():
        raise FileExistsError(f"{folder} already holds a finished corpus; give another folder, or move it away")
    if not folder.is_dir() or (folder / JOB_FILE).exists():
        return
    own = {LOCK_FILE, f"{JOB_FILE}.part"}  # of a process that died before it could say what it was about to do
    if strangers := sorted({path.name for path in folder.iterdir()} - own):
        raise FileExistsError(f"{folder} is not empty: it holds {strangers[0]}; give another folder")


def _check_job(folder: Path, job: dict[str, Any]) -> None:
    """Writes down what is to be made, or sees that it is what was begun here."""
    file = folder / JOB_FILE
    if not (folder / PROGRESS_FILE).exists():  # nothing is done yet, whatever was to be
        (folder / FILE_NAME).unlink(missing_ok=True)
        write_json(file, job)
        return
    begun = json.loads(file.read_text("utf-8"))
    changed = [name for name in job if name != "files" and begun.get(name) != job[name]]
    differences = [f"{name} {begun.get(name)!r} then, {job[name]!r} now" for name in changed]
    then, now = ({tuple(entry[:3]): entry[3:] for entry in side["files"]} for side in (begun, job))
    for name in [*then, *(name for name in now if name not in then)]:
        if then.get(name) != now.get(name):
            what = "changed" if name in then and name in now else "gone" if name in then else "new"
            differences.append(f"{name[0]} is {what}")
    if not differences and list(then) != list(now):
        differences = ["the files are in another order"]
    if differences:
        raise ValueError(
            f"{folder} holds the beginnings of another job: {'; '.join(differences[:5])}. "
            "Start that one again to go on with it, or give another folder"
        )


def _fingerprints(spans: Sequence[Span]) -> list[list[Any]]:
    """Of each span what tells it from another, then what tells whether its file has changed."""
    entries: list[list[Any]] = []
    for span in spans:
        state = span.path.stat()
        entries.append([str(span.path.resolve()), span.start, span.split, span.stop, state.st_size, state.st_mtime_ns])
    return entries


def _alphabet(folder: Path, spans: Sequence[Span], validation_fraction: float, field: str) -> Tokenizer:
    """A tokenizer of the characters that occur, or the one that was saved when the job was begun."""
    if (folder / FILE_NAME).exists():
        return load_tokenizer(folder)
    seen = np.zeros(0x110000, bool)
    for group in read_groups(spans, Position(), validation_fraction, field, cut_anywhere=True):
        text = "".join(piece.text for piece in group.pieces)
        seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
    if not seen.any():
        raise ValueError(f"there is no text in {spans[0].path}" + (" and the other files" if len(spans) > 1 else ""))
    return CharTokenizer("".join(map(chr, np.flatnonzero(seen).tolist())))


def _usable_cores() -> int:
    """Processors that this process may use, at most 8: with tiktoken each takes about 10 MB more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)
