"""tokens.jsonl: the text of every token id that samples.jsonl holds, and what is special about it."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from common.plumbing.metrics import read_lines

# Byte-level tokenizers write each byte of a token as one character: a printable one as itself, any other as the next of
# those from U+0100 on (GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


class TokenTexts:
    """Writes one line per token id, when it is first sampled or read; `path` may hold those of a resumed run already.

    A line is `{"step", "id", "text"}`, with `"special": true` for tokens that are no ordinary text, and
    `"end_of_turn": true` for those that end a turn.
    """

    def __init__(self, path: Path, tokenizer, end_of_turn_ids: list[int]):
        self._path, self._tokenizer = path, tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._ends = set(end_of_turn_ids)
        self._special = {i for i, token in self._added.items() if token.special} | {*tokenizer.all_special_ids}
        self._known = {line.get("id") for line in read_lines(path)}

    def add(self, step: int, ids: Iterable[int]) -> None:
        new = sorted(set(ids) - self._known)
        if not new:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step} | self._describe(i)) + "\n" for i in new)
        self._known.update(new)

    def _describe(self, i: int) -> dict:
        marks = {"special": i in self._special or i in self._ends, "end_of_turn": i in self._ends}
        return {"id": i, "text": self.text(i)} | {name: True for name, is_so in marks.items() if is_so}

    def text(self, i: int) -> str:
        """The text of one token, with its leading space; bytes that are no complete text as `<0xE2><0x82>`.

        Empty for an id that no token has: some models have more rows in their embeddings than tokens.
        """
        if i in self._added:
            return self._added[i].content
        piece = self._tokenizer.convert_ids_to_tokens(i)
        if not isinstance(piece, str):
            return ""
        if "\u2581" in piece:  # SentencePiece's space, which `decode` drops at the beginning
            return piece.replace("\u2581", " ")
        text = self._tokenizer.decode([i], clean_up_tokenization_spaces=False)
        if "\ufffd" not in text:
            return text
        if not set(piece) <= _BYTES.keys() or re.fullmatch("<0x[0-9A-F]{2}>", piece):  # SentencePiece's bytes
            return piece
        return _text_of(bytes(_BYTES[character] for character in piece))


def _text_of(raw: bytes) -> str:
    """
    >>> _text_of("\u20ac".encode()), _text_of("\u20ac".encode()[:2])
    ('€', '<0xE2><0x82>')
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)
