"""Ask the hub once, with little patience: its own client tries again for a minute when nobody answers."""

from pathlib import Path

from common.errors import UserError

from common.plumbing.terminal import say

TIMEOUT = 10  # seconds


def must_be_cached(what: str, name: str) -> bool:
    """Whether `name` has to come from this machine's cache, because the hub is switched off or does not answer.

    Args:
        what: "model" or "dataset".
        name: its id, owner/name.

    Raises:
        UserError: it cannot be had.
    """
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    if constants.is_offline_mode():
        return True
    ask = HfApi().model_info if what == "model" else HfApi().dataset_info
    try:
        ask(name, timeout=TIMEOUT)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name}: its owners ask for an agreement: give it at https://huggingface.co/{name}, then log in with "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{name}: the hub has no such {what}, or shows it to its owners only") from error
    except Exception as error:  # whatever a network can do to a request; the client has no common class for it
        problem = f"{name}: the hub does not answer ({' '.join(str(error).split())})"
        if what == "dataset":  # their loader asks the hub again, five times, unless this is set from the start
            raise UserError(f"{problem}; with HF_HUB_OFFLINE=1 a copy in this machine's cache is used") from error
        if try_to_load_from_cache(name, "config.json") is None:
            raise UserError(f"{problem}, and this machine's cache does not hold the {what}") from error
        say(f"{problem}; the copy in this machine's cache is used")
        return True
    return False


def commit_of(what: str, name: str) -> str | None:
    """The commit of a model or a dataset: the hub's newest, or if it does not answer that of this machine's cache."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        if not constants.is_offline_mode():
            return (HfApi().model_info if what == "model" else HfApi().dataset_info)(name, timeout=TIMEOUT).sha
    except Exception:  # whatever a network can do to a request; `must_be_cached` has told the user
        pass
    path = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=what) / "refs" / "main"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
