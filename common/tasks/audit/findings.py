"""What an audit has found: the rows of each finding, with their places."""

from dataclasses import dataclass, field
from typing import NamedTuple

from common.plumbing.task import Row


class Place(NamedTuple):
    """A row, where it is, and what is worth showing of it."""

    place: str  # file and line
    text: str


@dataclass
class Finding:
    """One kind of thing that can be wrong, and the rows with it."""

    name: str  # in the JSON
    title: str  # for people
    is_problem: bool
    of: int  # how many rows were examined
    places: list[Place] = field(default_factory=list)

    def add(self, row: Row, text: str) -> None:
        self.places.append(Place(row.place, text))


class Lengths(NamedTuple):
    """How long some texts are, in tokens."""

    name: str
    title: str
    tokens: list[int]
    limit: float  # what fits

    def percentile(self, share: float) -> int:
        """The smallest length that at least this share of the texts does not exceed.

        >>> [Lengths("", "", [1, 2, 3, 4], 3).percentile(share) for share in (0.5, 0.9, 1)]
        [2, 4, 4]
        """
        ordered = sorted(self.tokens)
        return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]

    @property
    def num_beyond(self) -> int:
        return sum(length > self.limit for length in self.tokens)


@dataclass
class Report:
    """Everything that was found out about the data of a task."""

    task: str
    sources: dict[str, str]  # "training" and "evaluation", where there is one
    num_rows: dict[str, int]  # that can be read, before the filters
    num_kept: dict[str, int]  # that pass the filters
    model: str
    context: float
    max_new_tokens: int
    findings: list[Finding]
    lengths: list[Lengths]

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_problem and finding.places]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_problem and finding.places]
