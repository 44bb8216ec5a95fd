"""Tests of text streams: concatenated deltas equal the sample's text, however its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.client.text_stream import GroupText, TextDelta
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.outcome import Outcome, pack
from rollout.requests.detokenizer import CompletionText
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import pack_top_n
from rollout.sampling_params import SamplingParams
from tests.requests.test_detokenizer import ids_of_bytes, tokenizer_named

PROMPT = [5, 6, 7]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


byte_level = partial(tokenizer_named, "byte_level")
of_bytes = partial(ids_of_bytes, "byte_level")


@dataclass
class Ending:
    ids: list[int]
    text: str
    reason: str = "length"
    stop: str | None = None


def ending(tokenizer: Any, ids: Sequence[int], params: SamplingParams) -> Ending:
    """Return the end as the engine finds it: by `CompletionText` if there are stop strings, else by `decode`."""
    if not params.stop:
        return Ending(list(ids), tokenizer.decode(list(ids), skip_special_tokens=True))
    completion = CompletionText(tokenizer, params.stop, params.include_stop_str_in_output)
    for count, token in enumerate(ids, 1):
        stop = completion.push(token, may_stop=count > params.min_tokens)
        if stop is not None:
            return Ending(list(ids[:count]), completion.text(), "stop", stop)
    return Ending(list(ids), completion.text())


def outcome(reason: str = "length", stop_reason: str | int | None = None, error: str | None = None) -> bytes:
    return pack(
        Outcome(reason, stop_reason, error, 0, VersionSpans(), VersionSpans(), [], None, None, 0, None, None, 256, 0)
    )


def stretch(
    ids: Sequence[int], start: int = 0, *, index: int = 0, version: int = 3, ended: bytes | None = None, **columns: Any
) -> Stretch:
    """One sample's new tokens; token i has the log-prob -i."""
    runs = [version, version, len(ids)] if len(ids) else [version]
    row = np.asarray(ids, "<i4")
    columns |= {} if ended is None else {"outcome": ended}
    columns = {name: [value] for name, value in columns.items()}
    return Stretch(7, 0, [index], [start], [len(ids)], row.tobytes(), (-row).astype("<f4").tobytes(), [runs], columns)


@dataclass
class Shown:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    restarts: int = 0
    last: TextDelta | None = None
    history: list[str] = field(default_factory=list)
    """The text after each delta since the sample last began."""

    def hear(self, delta: TextDelta) -> None:
        assert self.last is None or self.last.finish_reason is None, "an ended sample goes on"
        if delta.restarted:
            self.__init__(restarts=self.restarts + 1)  # type: ignore[misc]
        self.text += delta.text
        self.tokens += delta.token_ids
        self.log_probs += delta.log_probs
        self.versions += delta.policy_versions
        self.top += delta.top_log_probs or []
        self.last = delta
        self.history.append(self.text)


class Listener:
    def __init__(self, tokenizer: Any, params: SamplingParams | None = None) -> None:
        self.params = params or SamplingParams()
        self.group = OpenGroup(7, np.asarray(PROMPT, "<i4").tobytes(), self.params, 0, 0.0)
        self.stream = GroupText(self.params, tokenizer)
        self.shown = [Shown() for _ in range(self.params.n)]

    def hear(self, *stretches: Stretch) -> Shown:
        for each in stretches:
            each.check()
            self.group.take(each)
            for new in each.deltas():
                ended = None if new.outcome is None else self.group.request(new.sample_index)
                if (delta := self.stream.take(new, ended)) is not None:
                    self.shown[new.sample_index].hear(delta)
        return self.shown[0]


def cut(ids: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(start, tokens) of pieces that are as long as `cuts` say, in turn."""
    pieces, start = [], 0
    while start < len(ids):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append((start, list(ids[start : start + size])))
        start += size
    return pieces


def stream(tokenizer: Any, end: Ending, params: SamplingParams, cuts: Sequence[int]) -> Shown:
    """Return what is shown of a sample that arrives in pieces, the last of them with its outcome."""
    listener = Listener(tokenizer, params)
    pieces = cut(end.ids, cuts) or [(0, [])]
    for start, tokens in pieces[:-1]:
        listener.hear(stretch(tokens, start))
    start, tokens = pieces[-1]
    return listener.hear(stretch(tokens, start, text=end.text, ended=outcome(end.reason, end.stop)))


def letters(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False)


# --- any tokens, any cuts -----------------------------------------------------------------------------------------------

# Pieces of characters, whole ones in pieces, bytes that are never UTF-8.
FRAGMENTS = [
    b"\xf0\x9f",
    b"\x99\x82",
    "🙂".encode(),
    "é".encode(),
    b"\xc3",
    b"\xff",
    b"\x80",
    b"\n",
    b"a",
    "東".encode(),
]
STOPS = ["the", "\n\n", "🙂", "at", "é", "a\n", REPLACEMENT, " c"]


@st.composite
def completions(draw: st.DrawFn) -> list[int]:
    tokenizer = byte_level()
    fragments = st.one_of(
        st.sampled_from(FRAGMENTS).map(of_bytes),
        st.sampled_from([" the cat", "mat", " naïve", "東京", "\n"]).map(letters),
        st.integers(0, len(tokenizer) + 1).map(lambda token: [token]),
        st.sampled_from([0, 1, 2]).map(lambda token: [token]),
    )
    return [token for tokens in draw(st.lists(fragments, max_size=25)) for token in tokens]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_deltas_of_any_tokens_however_cut_join_to_the_text_the_engine_ends_with(data: st.DataObject) -> None:
    tokenizer = byte_level()
    params = SamplingParams(
        stop=data.draw(st.lists(st.sampled_from(STOPS), max_size=3)),
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 6)),
    )
    end = ending(tokenizer, data.draw(completions()), params)
    shown = stream(tokenizer, end, params, data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    assert shown.text == end.text
    # Nothing is taken back, so no U+FFFD has become a character and no stop string was shown.
    assert all(end.text.startswith(earlier) for earlier in shown.history)
    assert shown.tokens == end.ids
    assert shown.log_probs == [-token for token in end.ids]
    assert shown.versions == [3] * len(end.ids)
    assert shown.last is not None
    assert (shown.last.finish_reason, shown.last.stop_reason) == (end.reason, end.stop)
    assert shown.restarts == 0


def test_text_is_shown_as_soon_as_nothing_can_change_it() -> None:
    tokenizer = byte_level()
    listener = Listener(tokenizer, SamplingParams(stop=("sat on a chair",)))
    ids = letters("the cat sat on the mat")
    for position, token in enumerate(ids):
        shown = listener.hear(stretch([token], position))
        text = tokenizer.decode(ids[: position + 1])
        assert text.startswith(shown.text)
        assert len(text) - len(shown.text) < len("sat on a chair")
    assert shown.text == "the cat sat on the mat"


def test_a_stop_string_that_is_kept_is_shown_as_it_comes() -> None:
    params = SamplingParams(stop=("STOP",), include_stop_str_in_output=True)
    end = ending(byte_level(), of_bytes(b"aSTOP"), params)
    assert stream(byte_level(), end, params, [1]).history == ["a", "aS", "aST", "aSTO", "aSTOP"]


# --- how samples begin, and end -----------------------------------------------------------------------------------------


def test_a_sample_that_starts_afresh_says_so_and_begins_with_an_empty_text() -> None:
    ids = of_bytes(b"the cat sat")
    text = byte_level().decode(ids[2:])
    listener = Listener(byte_level())
    assert listener.hear(stretch(ids)).text == "the cat sat"
    assert listener.hear(stretch(ids[2:4], version=4)).restarts == 1
    shown = listener.hear(stretch(ids[4:], 2, version=4, text=text, ended=outcome()))
    assert (shown.text, shown.tokens, shown.restarts) == (text, ids[2:], 1)
    assert shown.versions == [4] * len(ids[2:])


def test_a_text_that_is_not_the_shown_ones_continuation_comes_whole_with_all_tokens() -> None:
    ids = of_bytes(b"abc")
    listener = Listener(byte_level(), SamplingParams(n=2))
    listener.hear(stretch(ids, index=1), stretch(ids[:2]))
    shown = listener.hear(stretch(ids[2:], 2, text="ABC", ended=outcome()))
    assert (shown.text, shown.tokens, shown.restarts) == ("ABC", ids, 1)
    assert (listener.shown[1].text, listener.shown[1].restarts) == ("abc", 0)


def test_without_a_tokenizer_there_is_no_text_before_the_engine_says_one() -> None:
    without = Listener(None).hear(stretch([5, 6]), stretch([7], 2, ended=outcome()))
    assert (without.text, without.tokens) == ("", [5, 6, 7])
    with_text = Listener(None).hear(stretch([5, 6]), stretch([7], 2, text="ab", ended=outcome()))
    assert with_text.history == ["", "ab"]


def test_an_engine_without_texts_leaves_the_last_word_to_the_stream() -> None:
    ids = of_bytes(b"a\xf0")
    listener = Listener(byte_level(), SamplingParams(stop=("abc",)))
    assert listener.hear(stretch(ids[:1]), stretch(ids[1:], 1, ended=outcome())).history == ["", "a" + REPLACEMENT]


class Picky:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        if 9 in token_ids:
            raise ValueError("9 is not a token")
        return "".join(map(str, token_ids))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(ids)


def test_a_token_that_the_tokenizer_cannot_read_costs_the_text_behind_it_alone() -> None:
    shown = Listener(Picky()).hear(stretch([1, 2]), stretch([9], 2), stretch([3], 3), stretch([], 4, ended=outcome()))
    assert (shown.text, shown.tokens) == ("12", [1, 2, 9, 3])
    shown = Listener(Picky()).hear(stretch([1]), stretch([9], 1), stretch([3], 2, text="1?3", ended=outcome()))
    assert shown.history == ["1", "1", "1?3"]


def test_the_last_delta_says_how_the_sample_ended() -> None:
    shown = Listener(None).hear(stretch([5]), stretch([], 1, ended=outcome("error", None, "RequestFailedError: NaN")))
    assert shown.last == TextDelta(0, "", [], [], [], None, False, "error", None, "RequestFailedError: NaN")
    shown = Listener(None).hear(stretch([5], ended=outcome("stop", 5)))
    assert shown.last == TextDelta(0, "", [5], [-5.0], [3], None, False, "stop", 5, None)


def test_the_likeliest_tokens_come_with_each_token_where_they_were_asked_for() -> None:
    rows = [[(5, -0.5), (6, -1.5)], [(8, -0.25), (7, -2.0)]]
    listener = Listener(None, SamplingParams(logprobs=2))
    listener.hear(stretch([5], top_n=pack_top_n(rows[:1])), stretch([7], 1, top_n=pack_top_n(rows[1:])))
    shown = listener.hear(stretch([], 2, ended=outcome()))
    assert shown.top == rows
    assert shown.last is not None
    assert shown.last.top_log_probs == []
    without = Listener(None, SamplingParams(logprobs=0)).hear(stretch([5], ended=outcome()))
    assert without.last is not None
    assert without.last.top_log_probs is None
