"""Why a run ended early, and how it goes on."""

import shlex
import shutil

from safetensors import SafetensorError

from common.errors import EngineError, UserError
from common.parallel import is_main

from harness.base import ranks, signals
from harness.base.config import PolicyConfig
from harness.base.files import NO_SPACE
from harness.base.machine import is_out_of_memory, out_of_memory
from harness.run.run import Run
from harness.run.settings import read_settings, write_settings
from harness.task.task_file import TaskError


def explain(error: BaseException, run: Run, config: PolicyConfig) -> BaseException:
    """The message for an error that ends a run, with the command that resumes it; otherwise the error itself."""
    request = run.stopping.request
    resume = f"resume with: {request.resume_command}"
    # an interrupt can become an error of another kind, for example during an import
    if isinstance(error, KeyboardInterrupt) or request.is_interrupted:
        page = f"\nits page so far: python -m viewer {shlex.quote(str(run.directory))}" if run.newest else ""
        return KeyboardInterrupt(f"interrupted; {resume}{page}")
    is_kept = config.resume or (run.directory / "metrics.jsonl").exists()
    if is_main() and not is_kept:
        shutil.rmtree(run.directory)
    if ranks.has_lost_others(error):
        return UserError(signals.LOST + (f"; {resume}" if run.directory.exists() else ""))
    if is_out_of_memory(error):
        return out_of_memory(config, error, request.resume_command if is_kept else None)
    if isinstance(error, EngineError) and is_kept:
        run.keep_progress()
        return UserError(f"{error}; when the engine can be used again, {resume}")
    if isinstance(error, TaskError) and is_kept:
        # so that resuming accepts a corrected task
        write_settings(run.directory, read_settings(run.directory) | {"task_failed": True})
        return UserError(f"{error}. When it is corrected, {resume}")
    # the errors of safetensors have no errno; they come from save_final
    if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in NO_SPACE):
        return UserError(f"{run.directory} could not be written ({error}); when there is space, {resume}")
    return error
