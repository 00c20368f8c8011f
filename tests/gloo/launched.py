"""Started by test_launch.py through a launcher: each process reports its role, or why it ends."""

import sys

from accelerate import Accelerator

from common.errors import UserError

from harness.processes.processes import check_launch, requested_launch

# write instead of print, which adds the line end separately: two processes share the output
accelerator = Accelerator(cpu="--not-on-cpu" not in sys.argv)  # with cpu=False, processes without a GPU do not connect
try:
    check_launch(requested_launch(), accelerator)
except UserError as error:
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)
sys.stdout.write(f"rank {accelerator.process_index} of {accelerator.num_processes}\n")
accelerator.end_training()  # leaves the process group
