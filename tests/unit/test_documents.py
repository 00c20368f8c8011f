"""A user's documents: which are read, how they are cut, and the messages about those that cannot be used."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError

from harness.search.documents import Document, content_hash, read_corpus, sections, split


@pytest.fixture(autouse=True)
def in_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def read(path: str = "docs", chunk_words: int = 100, chunk_overlap: int = 20, skipped: list | None = None) -> dict:
    documents = list(read_corpus(path, chunk_words, chunk_overlap, skipped))
    assert len({document.id for document in documents}) == len(documents)
    return dict(documents)


def write(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_rows(*rows: object, path: str = "docs.jsonl") -> None:
    write({path: "".join(json.dumps(row) + "\n" for row in rows)})


def test_text_files_of_a_directory_in_order_of_names():
    write({"docs/b.md": "# B\nbee", "docs/a/z.TXT": "zed", "docs/a/y.txt": "why\r\n\r\nnot", "docs/empty.txt": " \n"})
    write({"docs/.git/x.txt": "hidden", "docs/.hidden.md": "hidden", "docs/a.py": "code"})
    write({f"docs/runs/x/{name}": "of a run" for name in ("config.json", "metrics.jsonl", "final/README.md")})
    skipped = []
    found = read(skipped=skipped)
    assert list(found.items()) == [("b.md#1", "B: bee"), ("a/y.txt#1", "why\nnot"), ("a/z.TXT#1", "zed")]
    assert skipped == ["empty.txt"]
    assert read("docs/b.md") == {"b.md#1": "B: bee"}


@pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")
def test_loops_of_links_are_harmless():
    write({"docs/a/one.txt": "one", "elsewhere/two.txt": "two"})
    Path("docs/a/loop").symlink_to(Path("docs").absolute())
    Path("docs/linked").symlink_to(Path("elsewhere").absolute())
    Path("docs/linked again").symlink_to(Path("elsewhere").absolute())
    assert sorted(read().values()) == ["one", "two"]
    Path("docs/nowhere.md").symlink_to("gone")
    with pytest.raises(UserError, match=r"nowhere\.md cannot be read"):
        read()


@pytest.mark.parametrize("text", ["\ufeffcafé".encode(), "café".encode("utf-16")], ids=["UTF-8 with mark", "UTF-16"])
def test_byte_order_marks_are_not_text(text):
    write({"docs/a.txt": text, "docs.jsonl": b'\xef\xbb\xbf{"id": "a", "text": "b"}'})
    assert read() == {"a.txt#1": "café"}
    assert read("docs.jsonl") == {"a": "b"}


def test_rows_keep_their_ids_and_long_ones_are_cut():
    write_rows({"id": "a", "text": "one two"}, {"id": 7, "contents": '"Title"\nText.'}, {"id": "c", "text": "x " * 9})
    chunks = {"a": "one two", "7": '"Title"\nText.', "c#1": "x x x x x", "c#2": "x x x x x"}
    assert read("docs.jsonl", 5, 1) == chunks
    write({"docs.json": '[{"id": "a", "text": "b"}]', "docs.csv": "id,contents\na,b\n"})
    assert read("docs.json") == read("docs.csv") == {"a": "b"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "b.", "c!", "\n\n", "d" * 250, "東京", "e"])), st.data())
def test_chunks_hold_every_word_and_overlap(pieces, data):
    num_words = data.draw(st.integers(1, 8))
    overlap = data.draw(st.integers(0, num_words - 1))
    text = " ".join(pieces)
    chunks = [words(chunk) for chunk in split(text, num_words, overlap)]
    assert all(len(chunk) <= num_words for chunk in chunks)
    assert [chunk[:overlap] for chunk in chunks[1:]] == [chunk[len(chunk) - overlap :] for chunk in chunks[:-1]]
    assert [word for number, chunk in enumerate(chunks) for word in chunk[overlap if number else 0 :]] == words(text)
    new = [len(chunk) - overlap for chunk in chunks[:-1]]
    assert all(2 * count >= num_words - overlap for count in new)


def words(text: str) -> list[str]:
    return re.findall(r"[東京]|[^\s東京]{1,100}", text)


def test_chunks_prefer_to_end_with_sentences():
    text = "One two three four five. Six seven eight\n\nnine ten eleven twelve"
    chunks = ["One two three four five.", "five. Six seven eight", "eight\nnine ten eleven twelve"]
    assert list(split(text, 7, 1)) == chunks


MARKDOWN = """\
intro
# Guide ##
## Install *now*
Run it.
```sh
# no heading
~~~
```
## Use C#
#hashtag
    # indented code
Underlined
still the paragraph
---
Set
===
### FAQ
# Last
"""


def test_headings_lead_to_the_parts_of_markdown():
    assert [(headings, " ".join(body.split())) for headings, body in sections(MARKDOWN)] == [
        ("", "intro"),
        ("Guide > Install *now*", "Run it. ```sh # no heading ~~~ ```"),
        ("Guide > Use C#", "#hashtag # indented code Underlined still the paragraph --- Set ==="),
        ("Guide > Use C# > FAQ", ""),
        ("Last", ""),
    ]
    assert list(sections("One\n===\na\n\nTwo\n---\nb\n")) == [("One", "a\n\n"), ("One > Two", "b\n")]
    assert list(sections("---\ntitle: x\n---\na")) == [("", "---\ntitle: x\n---\na")]


def test_chunks_stay_within_their_headings():
    write({"docs/a.md": "# A\none two three four five\n## B\nsix\n# C\n"})
    chunks = ["A: one two three", "A: three four five", "A > B: six", "C"]
    assert list(read(chunk_words=3, chunk_overlap=1).values()) == chunks


def test_a_long_line_without_spaces_makes_small_chunks():
    write({"docs/a.txt": "x" * 3_000_000})
    chunks = list(read(chunk_overlap=0).values())
    assert max(map(len, chunks)) == 100 * 100
    assert sum(map(len, chunks)) == 3_000_000


def test_the_hash_is_of_ids_texts_order_and_chunks():
    write({"docs/a.txt": "one two three four"})
    base = [Document("a", "bc"), Document("d", "e")]
    others = [[Document("ab", "c"), base[1]], [Document("a", "bcd"), Document("", "e")], [base[0], Document("d", "f")]]
    others += [base[::-1], base[:1], [], *(list(read_corpus("docs", *cut)) for cut in ((2, 0), (2, 1), (3, 1)))]
    assert len({content_hash(documents) for documents in (base, *others)}) == 1 + len(others)
    assert content_hash(iter(base)) == content_hash(base)
