"""The bundled world: its rules, its shortest ways and its maps."""

import itertools
import random

import pytest

from tasks.thin_ice import ACTIONS, PAID, SUNK, Environment, distances, optimal, start_of, states_of, transition, view

from harness.base.config import ROOT
from harness.base.files import read_lines

FILES = ("thin_ice", "thin_ice_heldout", "thin_ice_large")
ROW = {"size": 2, "at": [1, 1], "has": False, "coin": [1, 2], "bridge": [2, 2], "ice": [[2, 1]], "max_turns": 7}


@pytest.fixture(scope="module")
def rows():
    return {name: read_lines(ROOT / "data" / f"{name}.jsonl") for name in FILES}


def test_the_rules_of_a_small_map():
    world = Environment()
    assert world.reset(ROW, 0) == "N coin, ice E"
    assert [world.step(action) for action in ("pay", "S", "jump", " N\n", "N")] == [
        ("N coin, ice E", 0.0, False),
        ("N coin, ice E", 0.0, False),
        ("error, N coin, ice E", 0.0, False),
        ("coin", 0.0, False),
        ("coin", 0.0, False),
    ]
    assert [world.step(action) for action in ("take", "take", "E")] == [
        ("E bridge", 0.0, False),
        ("E bridge", 0.0, False),
        ("bridge, ice S", 0.0, False),
    ]
    assert (world.state(), world.potential()) == ("2 2 1", -1.0)
    assert world.step("pay") == ("paid", 1.0, True)
    assert world.describe() == {"sunk": 0.0, "errors": 1, "near": 0.0, "middle": 1.0, "far": 0.0}
    world.reset(ROW, 0)
    assert world.step("E") == ("sunk", 0.0, True)
    assert world.describe()["sunk"] == 1.0


def test_distances_are_those_of_all_plays(rows):
    """Every play of at most six turns, from every state of some maps."""
    for row in rows["thin_ice"][:3]:
        found = distances(row)
        for start in random.Random(0).sample(states_of(row), 6):
            shortest, ends = 99, {start}
            for turns in itertools.count(1):
                ends = {transition(row, state, action) for state in ends - {PAID, SUNK} for action in ACTIONS}
                if PAID in ends or turns == 30:
                    shortest = turns if PAID in ends else None
                    break
            assert found.get(start) == shortest


def test_the_files_are_what_their_script_writes(rows, load_script):
    script = load_script("imitation/tiny_policy/make_thin_ice.py")
    heldout = script.make_rows("heldout", 16, range(2, 10))
    assert rows["thin_ice_heldout"] == heldout
    assert rows["thin_ice"] == script.make_rows("train", 128, range(2, 10), without=heldout)


def test_no_map_is_in_two_files_and_every_row_has_a_way(rows):
    known = [tuple(map(str, (row["size"], row["at"], row["has"], row["coin"], row["bridge"], row["ice"])))
             for some in rows.values() for row in some]  # fmt: skip
    assert len(set(known)) == len(known)
    for row in itertools.chain(*rows.values()):
        assert optimal(row) == row["optimal"] == row["max_turns"] - 3
        assert row["at"] not in row["ice"]
        assert len({tuple(place) for place in (row["coin"], row["bridge"], *row["ice"])}) == 2 + len(row["ice"])
        assert view(row, start_of(row))


def test_the_best_action_brings_the_end_nearer(rows):
    for row in rows["thin_ice_large"][:8]:
        world, left = Environment(), row["optimal"]
        world.reset(row, 0)
        while left:
            assert world.potential() == -left
            best = min(ACTIONS, key=lambda action: distances(row).get(transition(row, world.here, action), 99))
            _, reward, is_over = world.step(best)
            left -= 1
        assert (reward, is_over) == (1.0, True)
