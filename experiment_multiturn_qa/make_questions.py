"""Make questions about documents of your own: what experiment_multiturn_qa/train.py trains on with --corpus.

    python experiment_multiturn_qa/make_questions.py --corpus my_docs --output my_questions.jsonl
    python experiment_multiturn_qa/make_questions.py --corpus my_docs --output my_questions.jsonl \\
        --base-url http://127.0.0.1:8000/v1 --served-model Qwen/Qwen2.5-7B-Instruct

The corpus is a directory of .txt and .md files, or a JSONL with rows {"id": ..., "text": ...}; it is divided into
parts, with the same flags as in training. A row of the output is {"question": ..., "answer": ..., "supporting": [id of
the part that answers it], "difficulty": ...}. The answer has one to six words; it stands in the part, and not in the
question.

Who writes the questions: a model that is loaded here (--model), a model behind an OpenAI-compatible server (--base-url;
its key is read from the environment variable OPENAI_API_KEY), or without either a set of templates
(common/plumbing/questions/templates.py). A model should have at least some billion parameters; the bundled tiny
policies cannot do this.

The difficulty is that of finding the part when the question itself is the query, by words (BM25) among all parts: easy,
if the part is found first; medium, if among the first ten; else hard.

Parts are asked about in an order that --seed chooses, first all of them once, then again, until there are enough
questions. No two are equal, up to case, punctuation and articles. Nothing is held out here: training holds out
--eval-prompts rows of its questions by itself. Questions about one part can be on both sides, equal questions cannot.

The command can be interrupted, killed, and given again: it goes on where it was, and the result is the same.
"""

from common.plumbing.interrupt import handle_as_usual  # first: no traceback of Ctrl-C during the imports
import dataclasses
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from common.errors import UserError
from common.keyed import keyed_generator
from common.search import Index

from common.plumbing.checks import check_device, check_model, check_ranges, local_path
from common.plumbing.config import Count, CountOrZero, PolicyConfig, Positive, Seed, resolve
from common.plumbing.flags import show_description
from common.plumbing.questions.drafts import Unit, normalise
from common.plumbing.questions.progress import Progress, listed, open_progress
from common.plumbing.questions.rows import choose, to_rows
from common.plumbing.questions.served import ServedWriter, check_url
from common.plumbing.questions.templates import Templates, TemplateWriter
from common.plumbing.questions.writers import LocalWriter
from common.plumbing.retrieval.config import SearchConfig
from common.plumbing.retrieval.documents import Document, content_hash, read_corpus
from common.plumbing.retrieval.opening import check_search, open_index
from common.plumbing.start import run_main
from common.plumbing.terminal import say


@dataclass(frozen=True, kw_only=True)
class Config:
    # the documents: a directory with .txt and .md files, or a JSONL file with rows {"id": ..., "text": ...}
    corpus: str
    # the file of questions that is made, a JSONL; one that is complete is never overwritten
    output: str
    num_questions: Count = 500  # how many; fewer if the documents do not give as many
    per_part: Count = 3  # the most questions about one part of a document
    seed: Seed = 0  # of the order of the parts, and of the sampling
    chunk_words: Count = 100  # words of a document part, as in training
    chunk_overlap: CountOrZero = 20  # words that a part shares with the one before, as in training
    # who writes the questions: a hub id or a directory, as in training; held in float32, so for large ones use a server
    model: str | None = None
    base_url: str | None = None  # or a server that speaks OpenAI's protocol, with its path: http://127.0.0.1:8000/v1
    served_model: str | None = None  # the model's name on that server
    temperature: Positive = 0.7  # of a model's sampling
    max_new_tokens: Count = 256  # of a model's reply, with its thoughts if it thinks
    batch_size: Count = 16  # parts that --model reads at the same time; it bounds the memory
    requests_at_once: Count = 8  # to the server
    request_seconds: Positive = 60.0  # until a request to the server counts as failed; it is then sent again
    device: str = "auto"  # of --model: cpu, cuda, cuda:1, mps; auto: an accelerator if there is one
    dtype: Literal["float32", "bfloat16"] | None = None  # of --model's arithmetic; None: bfloat16 on cuda, else float32
    threads: Count = 1  # of --model on a CPU
    runs_dir: str = "runs"  # the index of the documents is kept in <runs-dir>/search_index, where training finds it


@dataclass(frozen=True, kw_only=True)
class Search(SearchConfig):
    search_seconds: float = 60.0  # nobody waits for it
    runs_dir: str = "runs"


# What may differ when the command is given again: it changes no question
FREE = ("corpus", "output", "runs_dir", "requests_at_once", "request_seconds")


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(argv)
    documents = list(read_corpus(config.corpus, config.chunk_words, config.chunk_overlap))
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE}
    settings["content of --corpus"] = content_hash(documents)
    if config.model is not None:
        from common.plumbing.settings import describe_sources

        settings["content of --model"] = describe_sources(_policy_config(config), None)["model"]["content"]
    with open_progress(local_path(config.output, "--output"), settings) as progress:
        try:
            make(config, documents, open_index(_search_config(config)), progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted with {progress.num_rows} questions; give the same command again to go on"
            ) from None
        finally:
            if progress.num_rows == 0:  # a mistake on the command line, perhaps, which can then be corrected
                progress.abandon()
        if progress.num_rows == 0:
            raise UserError(f"no question could be made of {config.corpus} ({listed(progress.discarded)})")
        progress.finish()
    report(config, progress)


def parse(argv: Sequence[str] | None) -> Config:
    """
    Raises:
        UserError: a value is out of range, or two contradict each other.
    """
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        show_description(__doc__, shutil.get_terminal_size().columns)
    tyro._experimental_options["ansi_codes"] = not os.environ.get("NO_COLOR")  # https://no-color.org
    config = tyro.cli(Config, args=argv, description="", config=(tyro.conf.DisallowNone,))
    check_ranges(config)
    check_search(_search_config(config))
    if config.model is not None and config.base_url is not None:
        raise UserError("--model and --base-url are two ways of making the questions: give one of them")
    if (config.base_url is None) != (config.served_model is None):
        raise UserError("--base-url and --served-model belong together: give both, or neither")
    if config.base_url is not None:
        check_url(config.base_url)
    if config.model is not None:
        check_model(_policy_config(config))
        check_device(config.device)
    handle_as_usual()
    return config


def _policy_config(config: Config) -> PolicyConfig:
    flags = {name: getattr(config, name) for name in ("model", "seed", "threads", "device", "dtype")}
    return PolicyConfig(**flags)


def _search_config(config: Config) -> Search:
    return Search(**{name: getattr(config, name) for name in ("corpus", "chunk_words", "chunk_overlap", "runs_dir")})


def make(config: Config, documents: list[Document], index: Index, progress: Progress) -> None:
    """Ask about the parts, in rounds, until there are enough questions or nothing more is to be asked."""
    from tqdm import tqdm

    order = keyed_generator("questions", config.seed).permutation(len(documents))
    units: list[Unit] = [(documents[number], asked) for asked in range(config.per_part) for number in order]
    known = {normalise(row["question"]) for row in progress.rows()}
    bar = tqdm(
        total=config.num_questions,
        initial=progress.num_rows,
        unit=" questions",
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file needs no line per question
    )
    with bar, closing(make_writer(config, documents).write(units, progress.num_asked)) as batches:
        while progress.num_rows < config.num_questions and (outcomes := next(batches, None)) is not None:
            asked = [document for document, _ in units[progress.num_asked :][: len(outcomes)]]
            kept, discarded = choose(asked, outcomes, known, config.num_questions - progress.num_rows)
            rows = to_rows(kept, index)
            progress.add(rows, len(outcomes), discarded, Counter(draft.kind for _, draft in kept))
            bar.update(len(rows))


def make_writer(config: Config, documents: list[Document]) -> TemplateWriter | LocalWriter | ServedWriter:
    if config.base_url is not None:
        sampling = {"temperature": config.temperature, "max_tokens": config.max_new_tokens}
        settings = {"model": config.served_model, **sampling}
        return ServedWriter(config.base_url, settings, config.seed, config.requests_at_once, config.request_seconds)
    if config.model is None:
        return TemplateWriter(Templates(documents, config.chunk_overlap))
    import torch

    from common.plumbing.loading import load_policy

    torch.set_num_threads(config.threads)
    policy = load_policy(resolve(_policy_config(config), {}), config.temperature)
    return LocalWriter(policy, (config.seed,), config.max_new_tokens, config.batch_size)


def report(config: Config, progress: Progress) -> None:
    difficulties = Counter(row["difficulty"] for row in progress.rows())
    say(f"{config.output}: {progress.num_rows} questions ({listed(progress.kinds)}; {listed(difficulties)})")
    if progress.discarded:
        say(f"left out: {listed(progress.discarded)}")
    if progress.num_rows < config.num_questions:
        say(f"more than these cannot be made with --per-part {config.per_part}")


if __name__ == "__main__":
    run_main(main)
