"""Build the index of a corpus before the first run, or build it again: train.py opens it with the same flags.

    python experiment_multiturn_qa/build_index.py --corpus my_documents
    python experiment_multiturn_qa/build_index.py --corpus wiki.jsonl --index wiki.sqlite
    python experiment_multiturn_qa/build_index.py --corpus my_documents --encoder intfloat/e5-base-v2

An index of other documents is replaced as soon as the new one is complete; a run that has opened the old one keeps it.
"""

from harness.base.interrupt import handle_as_usual  # first: Ctrl-C during the imports shows no traceback
import time
from collections.abc import Sequence

import tyro

from harness.base.config import shown
from harness.base.terminal import say
from harness.run.start import run_main
from harness.search.opening import build_index
from harness.search.search_config import IndexConfig as Config


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__, config=(tyro.conf.DisallowNone,))
    handle_as_usual()
    began = time.monotonic()
    index = build_index(config)
    costs = f"{time.monotonic() - began:.1f} s, {index.path.stat().st_size / 2**20:.1f} MiB on the disk"
    say(f"{index.num_documents:,} documents or parts of them, {costs}: {shown(index.path)}")


if __name__ == "__main__":
    run_main(main)
