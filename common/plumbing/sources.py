"""What a run is made from besides its settings: the contents of its model, data and task, by checksum or commit."""

from pathlib import Path

from common.errors import UserError

from common.plumbing.checks import flag
from common.plumbing.config import ModelConfig
from common.plumbing.files import sha256
from common.plumbing.hub import commit_of
from common.plumbing.ranks import is_first_here
from common.plumbing.task import Task
from common.plumbing.terminal import say

MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")  # of a Hugging Face directory


def describe_sources(config: ModelConfig, task: Task | None) -> dict[str, dict]:
    """By flag: where it is from, and its SHA-256, or for what comes from the hub the commit.

    The model's only in one process of each machine: it can be large.
    """
    sources = {name: getattr(config, name, None) for name in ("chat_template", "data", "tools")}
    if is_first_here():
        sources |= {"model": config.model_path or config.model}
        sources |= {"base": config.base} if config.adapter_path is not None else {}
    if task is not None:
        sources |= {"data": task.data, "eval_data": task.held_out_data, "task": task.path}
    described = {name: _describe(name, source) for name, source in sources.items() if source not in (None, "new")}
    return {name: source for name, source in described.items() if source["content"] is not None}


def check_sources(directory: Path, before: dict[str, dict], now: dict[str, dict], has_failed: bool) -> None:
    """Refuse to resume a run from a model, data or a task that are no longer what they were.

    Args:
        has_failed: the run ended with an error of its task, so that the task, or its data, may have been corrected.

    Raises:
        UserError: naming the flag and the file.
    """
    _check_evaluation(directory, before.get("eval_data"), now.get("eval_data"))
    for name in before.keys() & now.keys():
        then, content = before[name]["content"], now[name]["content"]
        if content == then:
            continue
        label = "the base of --model" if name == "base" else flag(name)
        what = f"{label} {now[name]['source']} is not what it was when {directory} began"
        if not has_failed or name in ("model", "base"):
            raise UserError(
                f"{what} ({then[:12]} then, {content[:12]} now): a resumed run needs the same content: restore it, or "
                "start a new run"
            )
        say(f"{what}; the run ended with an error of its task, and resumes with what is there now")


def _check_evaluation(directory: Path, before: dict | None, now: dict | None) -> None:
    """Refuse to hold out rows of the data now if they were evaluated on a file before, and the other way round.

    A hub dataset that is in one of them only is no sign of that: its commit may not have been known.

    Raises:
        UserError: naming the file.
    """
    if before is None and now is not None and Path(now["source"]).is_file():
        raise UserError(f"{now['source']} was not there when {directory} began, which held out rows of --data: move it")
    if now is None and before is not None and Path(before["source"]).is_absolute():
        raise UserError(f"{before['source']}, which {directory} is evaluated on, is no longer there: restore it")


def _describe(name: str, source: str | Path) -> dict:
    path = Path(source).expanduser()
    if path.is_dir():
        content = sha256([file for file in sorted(path.iterdir()) if file.suffix in MODEL_FILES])
    elif path.is_file():
        content = sha256([path])
    else:
        content = commit_of("model" if name in ("model", "base") else "dataset", str(source).partition(":")[0])
    return {"source": str(source), "content": content}
