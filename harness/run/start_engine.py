"""An inference engine for a run: its flags, its start and end, and a check that it samples from the trained policy."""

import shlex
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common.errors import EngineError, UserError
from common.experience import Experience
from common.parallel import gather, is_main
from common.policy import Policy

from harness.base.config import DTYPES, OfEngine, RunConfig
from harness.base.ranks import on_main, together
from harness.base.terminal import say
from harness.engines.engine import Engine
from harness.engines.folder import export
from harness.engines.server import ChildServer, free_port
from harness.engines.vllm import ENVIRONMENT, server_flags
from harness.logs.diagnosis import sampling_limit
from harness.processes.processes import requested_launch
from harness.run.run import Run
from harness.task.task import Task, check_context, fitting_length

LOG = "engine.log"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(RunConfig):
    """The additional settings of an experiment that samples with an engine."""

    # address of a vLLM or SGLang server that runs, such as http://127.0.0.1:8000; None: --engine-start starts one
    engine_url: OfEngine[str | None] = None
    # the Python that has vLLM, and further flags for its server, which this run starts and ends:
    # "/opt/vllm/bin/python --gpu-memory-utilization 0.4"; None: --engine-url names one that runs
    engine_start: OfEngine[str | None] = None
    # dtype of the engine's weights; None: as --dtype
    engine_dtype: OfEngine[Literal["float32", "bfloat16"] | None] = None
    # vLLM frees its weights and its cache during log-probs and update: for a server of this run alone, on its GPU
    engine_sleep: OfEngine[bool] = False


def start_engine(config: EngineConfig, run: Run, task: Task, policy: Policy) -> Engine:
    """The engine that `config` names; it is started if `config` says so, and ends with the run."""
    if requested_launch().sharding is not None:
        raise UserError("scale/engine pushes whole weights to its engine: start it without FSDP and DeepSpeed")
    folder, dtype = run.directory / "engine", DTYPES[config.engine_dtype or config.dtype]
    servers: list[ChildServer] = []  # only on the main process
    if is_main():
        run.contexts.callback(shutil.rmtree, folder, ignore_errors=True)  # as large as the model

    def start() -> str:
        export(policy, folder, dtype)
        length = fitting_length(task, policy, config.system_prompt, config.max_new_tokens)
        port, log = free_port(), run.directory / LOG
        flags = server_flags(folder, port, length, dtype, config.device, config.engine_sleep)
        say(f"starting an engine, which can take a minute; its output is in {log}")
        try:
            servers.append(ChildServer(server_command(config.engine_start, flags), port, log, ENVIRONMENT))
        except UserError as error:
            if not log.exists() or not log.stat().st_size:
                raise
            kept = Path(tempfile.mkdtemp(prefix="engine-")) / LOG  # the directory of a new run is removed if it fails
            shutil.copyfile(log, kept)
            raise UserError(str(error).replace(str(log), str(kept))) from error
        run.contexts.enter_context(closing(servers[0]))
        return f"http://127.0.0.1:{port}"

    url = config.engine_url or on_main(start)
    with together():
        engine = Engine(url, folder, dtype, config.engine_sleep)
    for server in servers:
        engine.server.ending = partial(server.ending, within=5.0)
    run.contexts.enter_context(closing(engine))
    if config.engine_sleep and not engine.server.can_sleep:
        raise EngineError(f"{engine.server.about} cannot sleep: start vLLM with --enable-sleep-mode")
    check_context(config, task, policy, engine)
    task.fits_context = True  # evaluations need not check again
    return engine


def server_command(start: str, flags: list[str]) -> list[str]:
    """The Python of `start` (--engine-start) with `flags`. The flags in `start` come last and win."""
    words = shlex.split(start)
    split = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    return [*words[:split], *flags, *words[split:]]


def compare_with_engine(config: EngineConfig, experience: Experience) -> dict[str, float]:
    """Measure how far the engine's log-probs are from the trainer's, over all action tokens; EngineError if too far."""
    mask = experience.action_mask.bool()
    weights = experience.importance_weights[mask]  # in float32, because clamping has also rounded the cap to float32
    difference = (experience.old_log_probs - experience.sampler_log_probs)[mask].abs()
    is_capped = weights >= config.importance_cap if config.importance_cap else torch.zeros_like(weights)
    parts = gather([len(weights), *(float(values.double().sum()) for values in (difference, is_capped))])
    count, *sums = (sum(values) for values in zip(*parts, strict=True))
    mean, capped = (value / count for value in sums)
    limit = sampling_limit(config)
    if not mean <= limit:  # also for NaN; all ranks agree, and save their progress together
        raise EngineError(
            f"the log-probs of the engine differ from the trainer's by {mean:.2g} nats on average, with {limit:g} as "
            "the limit: it does not have the policy's weights, or the temperature is not in its log-probs "
            "(--logprobs-mode processed_logprobs); no update was made from these samples"
        )
    largest = max(gather(float(difference.max()) if len(difference) else 0.0))
    return {"policy/sampling_log_prob_difference_max": largest, "policy/importance_capped": capped}
