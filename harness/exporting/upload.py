"""Upload a directory to the Hugging Face hub."""

from pathlib import Path

from common.errors import UserError

from harness.base.config import is_hub_id
from harness.base.terminal import printable


def check_push(name: str, needs_token: bool) -> None:
    from huggingface_hub import get_token

    if not is_hub_id(name):
        raise UserError(f"--push {printable(name, 80)}: a repository of the hub is owner/name")
    if needs_token and get_token() is None:
        raise UserError("--push needs a token of the hub that may write: hf auth login, or the variable HF_TOKEN")


def push(directory: Path, name: str, private: bool) -> str:
    """Create the repository if necessary, and send all files in one commit; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=private or None, exist_ok=True))
        if private and not api.repo_info(name).private:
            raise UserError(f"--private: {name} exists already, and is public; nothing was uploaded to it")
        api.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload the exported model")
    except UserError:
        raise
    except Exception as error:  # from the library, its HTTP client or its storage
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"the hub could not be used ({printable(str(error) or type(error).__name__, 300)})"
        if status in (401, 403):
            reason = f"the hub refuses the token ({status}): it must be allowed to write there"
        later = f"the export is complete, and can be sent later: hf upload {name} {directory}"
        raise UserError(f"--push {name}: {reason}; {later}") from error
    return address
