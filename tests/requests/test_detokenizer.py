"""Tests of incremental detokenising: the text equals the tokenizer's, and stop strings are found anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.requests.detokenizer import WINDOW, CompletionText, IncrementalDetokenizer, StableText

CORPUS = [
    "the cat sat on the mat",
    "naïve café, 東京 and 🙂🙃",
    " spaces  here",
    "line\nbreak\n\nend.",
    "don't stop. Why?",
] * 4
SPECIAL = ["<pad>", "<eos>"]


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2 and Gemma."""
    words = ["▁", "▁the", "▁cat", "a", "t", "▁▁", ".", "\ufffd"]
    names = [*SPECIAL, "<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    names = [*SPECIAL, "<unk>", "the", "cat", "##s", "##ing", ".", "'"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.decoder = decoders.WordPiece()
    return wrap(tokenizer)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "unigram": unigram,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
}


@cache
def tokenizer_named(name: str) -> PreTrainedTokenizerFast:
    return MAKERS[name]()


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int) -> Any:
        return self.tokenizer.convert_ids_to_tokens(ids)


class Letters:
    """Token i is the i-th of some strings."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.names[token] for token in token_ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.names[ids]


def ids_of_bytes(name: str, data: bytes) -> list[int]:
    """One token per byte."""
    tokenizer = tokenizer_named(name)
    if name == "byte_fallback":
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    # The letters that stand for bytes, in the order of GPT-2.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in plain)}
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in data]


def stream(name: str, ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer_named(name))
    pieces = [detokenizer.push([token]) for token in ids]
    assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.pending == ""
    return pieces


def run(completion: CompletionText, ids: Sequence[int], min_tokens: int = 0) -> tuple[str | None, int]:
    """The stop string found and after how many tokens."""
    for count, token in enumerate(ids, 1):
        stop = completion.push(token, may_stop=count > min_tokens)
        if stop is not None:
            return stop, count
    return None, len(ids)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MAKERS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_pieces_of_any_tokens_join_to_what_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_named(name)
    # Beyond the last id: a model's vocabulary is often padded.
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 1), max_size=60))
    assert "".join(stream(name, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(
        st.sampled_from([0x41, 0x80, 0xBD, 0xA0, 0xE4, 0xF0, 0x9F, 0x99, 0x82, 0xFF, 0xC3, 0xA9]), max_size=50
    )
)
def test_any_bytes_come_out_as_the_tokenizer_decodes_them(name: str, data: list[int]) -> None:
    ids = ids_of_bytes(name, bytes(data))
    assert "".join(stream(name, ids)) == tokenizer_named(name).decode(ids, skip_special_tokens=True)


def test_one_bad_byte_spoils_a_run_of_byte_tokens_so_the_run_is_held_back() -> None:
    good, bad = "東".encode(), b"\xff"
    assert stream("byte_fallback", ids_of_bytes("byte_fallback", good)) == ["", "", "", "東"]
    assert stream("byte_fallback", ids_of_bytes("byte_fallback", good + bad)) == ["", "", "", "", "\ufffd" * 4]


@pytest.mark.parametrize(
    ("name", "cycle"),
    [
        ("byte_level", b"hello "),
        ("byte_level", b"\x80"),
        ("byte_level", b"\xf0\x9f"),
        ("byte_level", b"\x98\x80\xf0\x9f"),
        ("byte_level", None),
        ("byte_fallback", None),
    ],
)
def test_work_per_token_does_not_grow_with_the_completion(name: str, cycle: bytes | None) -> None:
    """A greedy random model repeats itself thousands of times: an invalid byte, an ignored end of sequence (None)."""
    ids = ([1] if cycle is None else ids_of_bytes(name, cycle)) * 500
    counting = Counting(tokenizer_named(name))
    detokenizer = IncrementalDetokenizer(counting)
    text = detokenizer.push(ids) + detokenizer.finish()
    assert text == tokenizer_named(name).decode(ids, skip_special_tokens=True)
    assert counting.decoded <= 1.5 * WINDOW * len(ids)


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_a_newline_written_as_a_byte_token_stops_at_once() -> None:
    """Llama 2 has no other newline; the run of byte tokens it begins is not settled yet."""
    ids = ids_of_bytes("byte_fallback", b"\n")
    completion = CompletionText(tokenizer_named("byte_fallback"), ["\n"], False)
    the = tokenizer_named("byte_fallback").convert_tokens_to_ids("▁the")
    assert run(completion, [the, *ids, the]) == ("\n", 2)
    assert completion.text() == "the"


def test_stable_text_holds_back_what_may_become_a_stop_string() -> None:
    stable = StableText(Letters("xS", "T", "q"), ["STOP", "TQ"], False)
    assert [stable.push([token]) for token in (0, 1, 2)] == ["x", "", "STq"]


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=4), max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_are_found_as_a_search_of_the_whole_text_finds_them(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    completion = CompletionText(Letters(*pieces), stops, include)
    expected: tuple[str | None, str] = None, "".join(pieces)
    count = len(pieces)
    for number in range(min_tokens + 1, len(pieces) + 1):
        before, text = len("".join(pieces[: number - 1])), "".join(pieces[:number])
        found = [
            (i, -len(s), s) for s in stops for i in range(len(text)) if text.startswith(s, i) and i + len(s) > before
        ]
        if found:
            start, _, stop = min(found)
            expected, count = (stop, text[: start + len(stop) * include]), number
            break
    stable, stops_found, shown = StableText(Letters(*pieces), stops, include), [], ""
    for number in range(1, count + 1):
        stops_found.append(completion.push(number - 1, may_stop=number > min_tokens))
        if stops_found[-1] is None:
            shown += stable.push([number - 1])
        assert completion.text().startswith(shown)
    assert not any(stops_found[:-1])
    assert (stops_found[-1] if stops_found else None, completion.text()) == expected
