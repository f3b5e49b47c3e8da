"""docs/flags.md says what the parser and the tables of refusals say."""

import re
from pathlib import Path

import pytest

from megatron_mok.megatron.flag_docs import render

FLAGS = Path(__file__).parents[2] / "docs" / "flags.md"


def test_flags_are_those_of_the_parser():
    remedy = "make it anew: python -m megatron_mok.megatron.flag_docs > docs/flags.md"
    assert FLAGS.read_text() == render(), remedy


def test_tables_are_whole():
    """A bar in a text would begin another column."""
    rows = [line for line in FLAGS.read_text().splitlines() if line.startswith("| `")]
    columns = {line.count("|") for line in rows}
    assert len(rows) > 50
    assert columns == {3, 5}


def test_flags_that_texts_name_are_real(ranks):
    if not ranks.run("hook_cases.megatron_version")[0].startswith("0.19."):
        pytest.skip("some are of Megatron-Core 0.19")
    known = set(ranks.run("hook_cases.known_flags")[0])
    launcher = {"--dry-run", "--cpu", "--yaml-cfg"}
    named = set(re.findall(r"--[a-z0-9][a-z0-9-]+", FLAGS.read_text()))
    # By version; and those of Megatron after 0.19.
    others = {"--cuda-graph-modules", "--cuda-graph-scope", "--moe-megakernel-backend"}
    assert len(named & known) > 30
    assert named - known - launcher - others == set()
