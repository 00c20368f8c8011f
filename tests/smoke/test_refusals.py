"""Every entry of refusals.txt: the command ends with this sentence and status 2, and leaves nothing behind."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import ROOT

PLACES = {"ROOT": str(ROOT), "TINY": str(ROOT / "data" / "policies" / "tiny_policy")}


def read_table() -> list[tuple[list[str], str, str]]:
    """Of each entry: the lines that precede its command in its block, the command, and the sentence."""
    entries, text = [], (ROOT / "tests" / "refusals.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n\s*\n", text):
        before, command = [], ""
        for line in block.splitlines():
            if line.startswith("error: "):
                entries.append(([*before], command, line))
                before.append("")  # a file that is named again below is written anew
            elif line.startswith("$ python "):
                command = line.removeprefix("$ python ")
            elif not line.startswith("#"):
                before.append(line)
    assert len(entries) == text.count("\n$ python ")
    return entries


def prepare(lines: list[str]) -> None:
    """`NAME | LINE` is a line of a file, `NAME + VALUES` changes a JSON file, and `$ COMMAND` is for the shell."""
    written = set()
    for line in lines:
        name, mark, content = [*line.split(" ", 2), "", ""][:3]
        path = Path(name)
        if not line:
            written = set()
        elif name == "$":
            subprocess.run(line.removeprefix("$ "), shell=True, check=True, env=os.environ | PLACES)
        elif mark == "+":
            path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(content)))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if name in written else "w", encoding="utf-8") as file:
                file.write(f"{content}\n")
            written.add(name)


def files_here() -> dict[str, int | None]:
    """Without locks, indices of documents, and the folders runs/<experiment>, in which nothing may be."""
    ignored = r"runs(/[^/]*)?|runs/search_index/.*|.*\.lock"
    paths = (path for path in Path().rglob("*") if not re.fullmatch(ignored, str(path)))
    return {str(path): path.stat().st_mtime_ns if path.is_file() else None for path in paths}


ENTRIES = read_table()


@pytest.mark.parametrize(("before", "command", "sentence"), ENTRIES, ids=[command[:60] for _, command, _ in ENTRIES])
def test_a_mistake_is_refused_in_one_sentence(before, command, sentence, tmp_path, load_script, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepare(before)
    files = files_here()
    path, *words = shlex.split(re.sub(r"\$([A-Z]+)", lambda name: PLACES[name[1]], command))
    if path == "-m":
        path = words.pop(0).replace(".", "/")
        path += "/__main__.py" if (ROOT / path).is_dir() else ".py"
    monkeypatch.syspath_prepend((ROOT / path).parent)
    monkeypatch.setattr(sys, "argv", [str(ROOT / path), *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    module = load_script(path)
    monkeypatch.setattr("torch.optim.AdamW", None)  # nothing is trained
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    last = ast.parse((ROOT / path).read_text(encoding="utf-8")).body[-1]  # if __name__ == "__main__":
    with pytest.raises(SystemExit) as ended:
        exec(compile(ast.Module(last.body, []), path, "exec"), vars(module))
    errors = capsys.readouterr().err
    said = errors.rstrip("\n").rpartition("\n")[2]
    if "pip install" in said and "pip install" not in sentence:
        pytest.skip(said)
    assert re.fullmatch(re.escape(sentence).replace(r"\.\.\.", ".*"), said), said
    assert ended.value.code == 2
    assert files_here() == files
