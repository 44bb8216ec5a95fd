"""Tests of version spans against a list with one version per position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import SerializationError
from rollout.requests.spans import VersionSpans

VERSIONS = st.integers(0, 4)
RUNS = st.lists(st.tuples(VERSIONS, st.integers(0, 5)), max_size=8)


def ledger(runs: list[tuple[int, int]]) -> list[int]:
    return [version for version, count in runs for _ in range(count)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.integers(0, 4), VERSIONS),
            st.tuples(st.just("extend_to"), st.integers(0, 20), VERSIONS),
            st.tuples(st.just("clear")),
        ),
        max_size=30,
    )
)
def test_spans_equal_a_list_with_one_version_per_position(operations):
    spans, dense = VersionSpans(), []
    for name, *arguments in operations:
        getattr(spans, name)(*arguments)
        if name == "extend":
            count, version = arguments
            dense += [version] * count
        elif name == "extend_to":
            length, version = arguments
            dense += [version] * (length - len(dense))
        else:
            dense.clear()
        assert spans.dense().tolist() == dense
        assert len(spans) == len(dense)
        assert [spans.version_at(position) for position in range(len(dense))] == dense
        assert spans.newest() == max(dense, default=None)
        for start in range(len(dense) + 2):
            assert spans.oldest(start) == min(dense[start:], default=None)
        assert ledger(spans.runs) == dense
        assert all(count > 0 for _, count in spans.runs)
        assert all(a[0] != b[0] for a, b in zip(spans.runs, spans.runs[1:], strict=False))


@given(RUNS)
def test_deserialize_is_the_inverse_of_serialize(runs):
    spans = VersionSpans(runs)
    assert VersionSpans.deserialize(spans.serialize()) == spans


@pytest.mark.parametrize("position", [-1, 3, 100])
def test_a_position_outside_is_an_index_error_that_names_it(position):
    with pytest.raises(IndexError, match=rf"position={position}"):
        VersionSpans([(0, 3)]).version_at(position)


@pytest.mark.parametrize("flat", [None, "01", [0], [0, 0], [0, -1], [0, 1.0], [True, 1], [0, 1, 2], {0: 1}])
def test_a_malformed_list_is_a_serialization_error(flat):
    with pytest.raises(SerializationError, match="VersionSpans"):
        VersionSpans.deserialize(flat)
