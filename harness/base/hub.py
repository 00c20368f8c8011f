"""Datasets of the hub, and whether the hub answers; we wait less long than its own client."""

import functools
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from common.errors import UserError

from harness.base.checks import local_path
from harness.base.config import is_hub_id
from harness.base.terminal import say, short

TIMEOUT = 10  # seconds
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zip", ".zst", ".txt")  # never end a hub name


def must_be_cached(what: str, name: str) -> bool:
    """Whether a "model" or "dataset" has to come from the cache; UserError if it is not available at all."""
    from huggingface_hub import constants, errors, try_to_load_from_cache

    if constants.is_offline_mode():
        return True
    try:
        _ask(what, name)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name}: its owners ask for an agreement: give it at https://huggingface.co/{name}, then log in with "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{name}: the hub has no such {what}, or shows it to its owners only") from error
    except Exception as error:  # a network can fail in any way; the client has no common class for these errors
        problem = f"{name}: the hub does not answer ({' '.join(str(error).split())})"
        if what == "dataset":  # the loader asks the hub again, five times, unless this is set from the start
            raise UserError(f"{problem}; with HF_HUB_OFFLINE=1 a copy in this machine's cache is used") from error
        if try_to_load_from_cache(name, "config.json") is None:
            raise UserError(f"{problem}, and this machine's cache does not hold the {what}") from error
        say(f"{problem}; the copy in this machine's cache is used")
        return True
    return False


def commit_of(what: str, name: str) -> str | None:
    """The commit of a model or a dataset: the hub's newest or, if the hub does not answer, the cached one."""
    from huggingface_hub import constants, snapshot_download

    with suppress(Exception):  # network errors: `must_be_cached` has told the user
        if not constants.is_offline_mode():
            return _ask(what, name).sha
    with suppress(Exception):  # the file does not exist
        return Path(snapshot_download(name, repo_type=what, local_files_only=True)).name
    return None


def _ask(what: str, name: str):
    from huggingface_hub import HfApi

    return HfApi().repo_info(name, repo_type=what, timeout=TIMEOUT)


def is_hub_source(source: str, path: Path | None = None) -> bool:
    """Whether `source` names a hub dataset, `owner/name[:subset[:split]]`, and not a file, which would be at `path`."""
    path = local_path(source, "the data file") if path is None else path
    return is_hub_id(source.partition(":")[0]) and not path.exists() and path.suffix not in FILES


def find_source(value: object, file: Path, what: str) -> str | None:
    """The data that a task names as its `what`: a path relative to the task's file, or a hub dataset."""
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise UserError(f"{what} must be a path, not {short(value)}")
    path = file.resolve().parent / local_path(str(value), what)
    return value if isinstance(value, str) and is_hub_source(value, path) else str(path)


def read_split(source: str) -> list[dict]:
    """The rows of a split of a hub dataset, by default "train"; a UserError names the available splits.

    The subset `*` stands for all of them, in the hub's order; each row then has its subset in the field `subset`.
    """
    name, subset, split = _parts(source)
    if subset == "*":
        return [row | {"subset": each} for each in _subsets(name) for row in read_split(f"{name}:{each}:{split}")]
    splits, split = _load(name, subset, os.getcwd()), split or "train"
    if split not in splits:
        raise UserError(
            f"the dataset {f'{name}:{subset}'.rstrip(':')} has no split {split!r} (there are: {', '.join(splits)}): "
            f"{name}:{subset}:{next(iter(splits))}, for example"
        )
    return splits[split].to_list()


def _subsets(name: str) -> list[str]:
    import datasets

    must_be_cached("dataset", name)
    try:
        return datasets.get_dataset_config_names(name)
    except Exception as error:  # as in `_load`
        raise UserError(f"the subsets of {name} could not be listed: {' '.join(str(error).split())}") from error


def read_local(path: Path, kind: str, file: str) -> list[dict]:
    """The rows of a local file of the kind "parquet" or "arrow"; `file` names it in errors."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:  # a copy in the user's cache would stay there
        try:
            options = {"data_files": str(path), "split": "train", "cache_dir": cache}
            return datasets.load_dataset(kind, **options, trust_remote_code=False).to_list()
        except Exception as error:  # a damaged file can raise anything
            reason = " ".join(str(error.__cause__ or error).split())
            raise UserError(f"{file} cannot be read as {kind.capitalize()}: {reason}") from error


def find_test_split(source: str) -> str | None:
    """The source with the split "test", if it names no split and the dataset has that split."""
    name, subset, split = _parts(source)
    return f"{name}:{subset}:test" if not split and "test" in _load(name, subset, os.getcwd()) else None


def _parts(source: str) -> list[str]:
    """
    >>> _parts("openai/gsm8k:main:test"), _parts("owner/name"), _parts("owner/name::test")
    (['openai/gsm8k', 'main', 'test'], ['owner/name', '', ''], ['owner/name', '', 'test'])
    """
    return [*source.split(":", 2), "", ""][:3]


@functools.lru_cache(maxsize=2)  # training data and held-out data can be two splits of one dataset
def _load(name: str, subset: str, _directory: str):
    """All splits of a dataset: loading one split downloads all of them anyway."""
    import datasets

    must_be_cached("dataset", name)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, subset or None, trust_remote_code=False)
    except Exception as error:  # the client raises many kinds of errors; if a subset is missing, they name the others
        source, reason = f"{name}:{subset or 'SUBSET'}", " ".join(str(error).split())
        raise UserError(f"the dataset {source} could not be loaded: {reason}") from error
