"""Where the experiments of the repository are, and what older runs know under another path."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ("policy_gradients", "rewards", "imitation", "agents", "scale")
MOVED = {
    "assets": "data/policies",
    "notebooks": "docs/notebooks",
    "accelerate_configs": "recipes/accelerate_configs",
}


def in_experiments(pattern: str) -> list[Path]:
    """The paths in the directories of all experiments that match a pattern, for example "train.py"."""
    places = [place for folder in ("", *CHAPTERS) for place in (ROOT / folder).glob("*") if place.is_dir()]
    return sorted(path for place in places if (place / "train.py").is_file() for path in place.glob(pattern))


def current_name(name: str) -> str:
    """The name of an experiment today: a run of experiment_rloo is one of rloo.

    >>> current_name("experiment_rloo"), current_name("experiment_base"), current_name("mine")
    ('rloo', 'experiment_base', 'mine')
    """
    names = {path.parent.name for path in in_experiments("train.py")}
    short = name.removeprefix("experiment_")
    return short if name not in names and short in names else name


def train_file(name: str) -> str:
    """The train.py of an experiment as a path in the repository, also for a name in an older run.

    >>> train_file("experiment_rloo"), train_file("mine")
    ('policy_gradients/rloo/train.py', 'mine/train.py')
    """
    paths = {path.parent.name: path.relative_to(ROOT).as_posix() for path in in_experiments("train.py")}
    return paths.get(current_name(name), f"{name}/train.py")


def current_path(text: str) -> str:
    """A path that an older run or adapter names: if it is one of the repository that has moved, where it is now.

    >>> current_path("assets/tiny_policy") == str(ROOT / "data/policies/tiny_policy"), current_path("owner/model")
    (True, 'owner/model')
    """
    parts = Path(text).parts
    for i, part in enumerate(parts):
        new = Path(train_file(part)).parent if part.startswith("experiment_") else MOVED.get(part)
        if new and (path := ROOT.joinpath(new, *parts[i + 1 :])).exists() and not Path(text).expanduser().exists():
            return str(path)
    return text
