"""GGUF, the format of llama.cpp: its own program converts a Hugging Face directory."""

import shutil
import subprocess
import sys
from pathlib import Path

from common.errors import UserError

from common.plumbing.checks import local_path
from common.plumbing.config import shown
from common.plumbing.terminal import printable

CONVERTER = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def find_converter(llama_cpp: str | None) -> Path:
    """
    Raises:
        UserError: there is none.
    """
    if llama_cpp is None:
        found = shutil.which(CONVERTER)
        if found is None:
            raise UserError(
                f"--quantize gguf needs {CONVERTER} of llama.cpp, which is not on the PATH: download "
                "https://github.com/ggml-org/llama.cpp and give its directory: --llama-cpp DIR"
            )
        return Path(found)
    path = local_path(llama_cpp, "--llama-cpp") / CONVERTER
    if not path.is_file():
        raise UserError(f"--llama-cpp {printable(llama_cpp, 80)} holds no {CONVERTER}")
    return path


def convert(converter: Path, model: Path, target: Path, dtype: str, name: str) -> None:
    """
    Args:
        name: of the model, in the file.

    Raises:
        UserError: the converter refuses the model, with its last line.
    """
    command = [sys.executable, str(converter), str(model), "--outfile", str(target), "--outtype", TYPES[dtype]]
    command += ["--model-name", name]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if result.returncode or not target.is_file():
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["it printed nothing"]
        reason = next((line for line in reversed(lines) if "not recognized" in line), lines[-1])
        raise UserError(f"{shown(converter)} could not convert the model: {printable(reason, 300)}")
