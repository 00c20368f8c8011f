"""Whether questions and documents belong together."""

from common.errors import UserError
from common.search import Index, supporting

from common.plumbing.config import shown
from common.plumbing.retrieval.config import SearchConfig
from common.plumbing.retrieval.documents import read_corpus
from common.plumbing.retrieval.opening import corpus_of
from common.plumbing.task import Task
from common.plumbing.terminal import printable, say


def check_questions(config: SearchConfig, index: Index | None, task: Task) -> None:
    """Look for the documents that the rows of a task name as supporting; say so if some of them are not there.

    An index without its corpus, and a server, are not asked: they do not list their documents.

    Raises:
        UserError: none of them is there.
    """
    if index is None or config.search_url is not None or (config.index is not None and config.corpus is None):
        return
    rows = task.train_rows + task.eval_rows
    named = {name for row in rows for name in supporting(row)}
    missing = set(named)
    if named:
        for document in read_corpus(corpus_of(config), config.chunk_words, config.chunk_overlap):
            missing -= {document.id, document.id.rpartition("#")[0]}
    if not missing:
        return
    what = f"the documents that the questions in {shown(task.data)} name as supporting"
    where, example = shown(corpus_of(config)), printable(min(missing), 80)
    if missing == named:
        raise UserError(
            f"none of {what}, such as {example!r}, is in {where}: give the --questions that belong to --corpus, and "
            "the --chunk-words and --chunk-overlap with which they were made"
        )
    say(f"{len(missing)} of {len(named)} of {what} are not in {where}, such as {example!r}: nothing can find them")
