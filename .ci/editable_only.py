"""The build backend: setuptools, for `pip install -e .` alone.

A wheel would put common, tasks and harness into everybody's site-packages, without the policies and the experiments.
"""

from typing import NoReturn

from setuptools import build_meta

get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_editable = build_meta.build_editable


def build_wheel(*_, **__) -> NoReturn:
    raise SystemExit("rl-textbook is a repository, not a library: clone it, and run `pip install -e .` there")


build_sdist = build_wheel
