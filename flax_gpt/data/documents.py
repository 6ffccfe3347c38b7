"""Text files as a stream of documents, cut into pieces: read once, from any place on, in little memory."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flax_gpt.data.corpus import list_files

PIECE = 1 << 19  # bytes to read, and to encode, at a time
_WHITE_SPACE = " \n\t\r"


@dataclasses.dataclass(frozen=True)
class Span:
    """A file, or a part of one, to read: a document, or, of a .jsonl file, a document a line.

    Attributes:
        path: of the file.
        start, stop: in bytes.
        split: "train" or "validation"; None where each document's number decides.
    """

    path: Path
    start: int
    stop: int
    split: str | None = None


@dataclasses.dataclass(frozen=True)
class Position:
    """How far reading has come: bytes and lines of the span's file, and documents of all spans, read so far."""

    span: int = 0
    offset: int = 0
    line: int = 0
    document: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document, or a part of it.

    Attributes:
        text: what it says.
        size: of its UTF-8 encoding, in bytes.
        split: "train" or "validation".
        ends_document: whether it is the document's last.
    """

    text: str
    size: int
    split: str
    ends_document: bool


@dataclasses.dataclass(frozen=True)
class Group:
    """Pieces that are encoded together, from half a `PIECE` on; `after` is where the next group begins."""

    pieces: list[Piece]
    after: Position


def list_spans(inputs: Sequence[Path], validation: Sequence[Path], validation_fraction: float) -> list[Span]:
    """What to read: first all inputs, then the files that are to validate with.

    A single text file with no file to validate with is cut in two: its last characters are to validate with.

    Raises:
        FileNotFoundError: there is nothing at one of the paths.
        ValueError: the text cannot be cut.
    """
    files = [file for path in inputs for file in list_files(path)]
    if not validation and len(files) == 1 and not is_lines(files[0]):
        size, cut = files[0].stat().st_size, _cut_at_fraction(files[0], 1 - validation_fraction)
        return [Span(files[0], 0, cut, "train"), Span(files[0], cut, size, "validation")]
    split = "train" if validation else None
    spans = [Span(file, 0, file.stat().st_size, split) for file in files]
    return spans + [
        Span(file, 0, file.stat().st_size, "validation") for path in validation for file in list_files(path)
    ]


def is_lines(path: Path) -> bool:
    """Whether a file holds a document a line."""
    return path.suffix == ".jsonl"


def split_of(document: int, validation_fraction: float) -> str:
    """The part that a document falls to, by its number alone: of every 1 / fraction of them one is to validate with.

    Which one of them is hashed, so that it has no rhythm; but document 0 is, so that there is always one.
    """
    every = round(1 / validation_fraction)
    block, place = divmod(document, every)
    drawn = zlib.crc32(block.to_bytes(8, "little")) % every if block else 0
    return "validation" if place == drawn else "train"


def read_groups(
    spans: Sequence[Span],
    position: Position,
    validation_fraction: float,
    field: str = "text",
    cut_anywhere: bool = False,
) -> Iterator[Group]:
    """The documents from a position on; the groups are the same whether one starts there or came there.

    Args:
        spans: what to read.
        position: where to start: the `after` of a group, or `Position()`.
        validation_fraction: see `split_of`.
        field: of a line's object, the one with the text.
        cut_anywhere: long documents may be cut between any two characters. Otherwise they are cut only before white
            space that follows something else, where GPT-2's tokenizer always cuts too.

    Raises:
        ValueError: a file is not UTF-8, a line is not an object with the field, or a file has changed meanwhile.
    """
    pieces: list[Piece] = []
    size = 0
    line, document, start = position.line, position.document, position.offset
    for number in range(position.span, len(spans)):
        span = spans[number]
        if is_lines(span.path):
            texts = _read_lines(span, start, line, field)
        else:
            texts = _read_text(span, max(start, span.start), cut_anywhere)
        for text, offset, ends_document in texts:
            line += 1
            if text:
                split = span.split or split_of(document, validation_fraction)
                pieces.append(Piece(text, _utf8_size(text, span, line), split, ends_document))
                size += pieces[-1].size
                document += ends_document
            if size >= PIECE // 2:  # a piece of a long document is a little below one
                yield Group(pieces, Position(number, offset, line, document))
                pieces, size = [], 0
        line = start = 0
    if pieces:
        yield Group(pieces, Position(len(spans), 0, 0, document))


def _read_lines(span: Span, offset: int, line: int, field: str) -> Iterator[tuple[str, int, bool]]:
    """(text, where the next line begins, True) of each line."""
    with span.path.open("rb") as file:
        file.seek(offset)
        for number, content in enumerate(file, line + 1):
            offset += len(content)
            if not content.strip():
                yield "", offset, True
                continue
            try:
                text = json.loads(content.decode("utf-8"))[field]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise ValueError(
                    f"{span.path}, line {number}: expected a JSON object with a text in {field!r}, got "
                    f"{content[:60].decode('utf-8', 'replace')!r} ({type(error).__name__})"
                ) from None
            yield text, offset, True
    _check_end(span, offset)


def _read_text(span: Span, offset: int, cut_anywhere: bool) -> Iterator[tuple[str, int, bool]]:
    """(text, where the next piece begins, whether this is the last) of pieces of up to a `PIECE`, or what it takes.

    Where a piece ends depends on where it begins alone, so that one who starts there finds the same pieces.
    """
    text, undecoded, reached, target = "", b"", offset, offset + PIECE
    with span.path.open("rb") as file:
        file.seek(offset)
        while reached < span.stop:
            read = file.read(min(target, span.stop) - reached)
            if not read:
                break
            reached += len(read)
            more, undecoded = _decode(undecoded + read, span.path, reached, last=reached == span.stop)
            known = len(text)
            text += more
            if reached == span.stop:
                yield text, reached, True
            elif cut := len(text) if cut_anywhere else last_cut(text, known):
                piece, text = text[:cut], text[cut:]
                offset += len(piece.encode("utf-8"))
                target = offset + PIECE
                yield piece, offset, False
            else:
                target += PIECE
    _check_end(span, reached)


def last_cut(text: str, known: int = 0) -> int:
    """The last place before white space that follows something else, 0 where there is none; none is before `known`."""
    for place in range(len(text) - 1, max(known - 1, 0), -1):
        if text[place] in _WHITE_SPACE and not text[place - 1].isspace():
            return place
    return 0


def _decode(content: bytes, path: Path, end: int, last: bool) -> tuple[str, bytes]:
    """The text, and the bytes of a character that is still incomplete."""
    try:
        return content.decode("utf-8"), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and not last:
            return content[: error.start].decode("utf-8"), content[error.start :]
        place = end - len(content) + error.start
        raise ValueError(
            f"{path} is not UTF-8 text: byte {content[error.start]:#04x} at offset {place}; "
            "convert it to UTF-8 or leave it out"
        ) from error


def _utf8_size(text: str, span: Span, line: int) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{span.path}, line {line}: half a surrogate pair ({text[error.start]!r}) is no character"
        ) from error


def _check_end(span: Span, reached: int) -> None:
    if reached != span.stop:
        raise ValueError(f"{span.path} changed while it was read: {span.stop} bytes before, {reached} now")


def _cut_at_fraction(path: Path, fraction: float) -> int:
    """The offset in bytes of the character at a fraction of a text's characters."""
    # Every character has one byte that does not continue another's: counting these needs no decoding.
    remaining = int(sum(_count_first_bytes(block) for block in _blocks(path)) * fraction)
    offset = 0
    for block in _blocks(path):
        count = _count_first_bytes(block)
        if count > remaining:
            bytes_of = np.frombuffer(block, np.uint8)
            return offset + int(np.flatnonzero((bytes_of & 0xC0) != 0x80)[remaining])
        remaining -= count
        offset += len(block)
    return offset


def _count_first_bytes(block: bytes) -> int:
    return int(np.count_nonzero((np.frombuffer(block, np.uint8) & 0xC0) != 0x80))


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(PIECE):
            yield block
