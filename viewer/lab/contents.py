"""What the page of the laboratory needs of the repository: the kernels, the bundled policy, its questions, scripts."""

import base64
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POLICY = ROOT / "data" / "policies" / "tiny_policy"
QUESTIONS = ROOT / "data" / "math_tasks.jsonl"
SCRIPTS = ("keyed", "tokenizer", "policy", "sampling", "loss", "rewards", "train", "worker")  # in the order of imports
SPECIAL, END_OF_TURN = 1, 2  # flags of a token, as viewer/report.py has them


def lab_data() -> dict:
    """The message that loads the worker, as JSON: bytes are in base64."""
    tokenizer = json.loads((POLICY / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((POLICY / "config.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    data = {
        "tokenizer": {"model": {name: tokenizer["model"][name] for name in ("vocab", "merges")}},
        "questions": [{"question": row["question"], "answer": row["answer"]} for row in rows],
        "token_texts": token_texts(tokenizer, config["eos_token_id"]),
    }
    data["tokenizer"]["added_tokens"] = [{"id": t["id"], "content": t["content"]} for t in tokenizer["added_tokens"]]
    return {
        "wasm": encoded((HERE / "kernels.wasm").read_bytes()),
        "config": config,
        "weights": encoded((POLICY / "model.safetensors").read_bytes()),
        "data": data,
    }


def token_texts(tokenizer: dict, end_of_turn_id: int) -> dict[int, list]:
    """[text, flags] by id, as a run writes them; a part of a character is U+FFFD."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are letters of their own
    others = [byte for byte in range(256) if byte not in printed]
    byte_of = {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}
    texts = {
        i: [bytes(byte_of[letter] for letter in piece).decode(errors="replace"), 0]
        for piece, i in tokenizer["model"]["vocab"].items()
    }
    for token in tokenizer["added_tokens"]:
        flags = SPECIAL * token["special"] + END_OF_TURN * (token["id"] == end_of_turn_id)
        texts[token["id"]] = [token["content"], flags]
    return dict(sorted(texts.items()))


def worker_script(names: tuple[str, ...] = SCRIPTS, *, is_module: bool = False) -> str:
    """The scripts as one: without imports, and without exports unless it is a module."""
    text = "\n".join((HERE / f"{name}.js").read_text(encoding="utf-8") for name in names)
    text = re.sub(r"^import .*\n", "", text, flags=re.MULTILINE)
    return text if is_module else re.sub(r"^export ", "", text, flags=re.MULTILINE)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
