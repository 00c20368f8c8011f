"""Runs a program while Accelerate takes CPU processes for GPU processes.

On a CPU Accelerate silently replaces FSDP2 with plain data parallelism. One field of its state makes the difference;
with this field set, all of its code for FSDP2 runs over gloo.
"""

import runpy
import sys

import accelerate
from accelerate.utils import DistributedType


class Accelerator(accelerate.Accelerator):
    def __init__(self, cpu: bool = False, **settings):
        super().__init__(**settings)


if __name__ == "__main__":
    accelerate.PartialState(cpu=True)
    accelerate.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerate.Accelerator = Accelerator
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
