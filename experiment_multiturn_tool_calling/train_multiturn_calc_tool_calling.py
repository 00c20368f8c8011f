"""experiment_multiturn_tool_calling/train.py, under the name that people know."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
