"""Tests of length estimates: they decide the start order and nothing else."""

from __future__ import annotations

from rollout.manager.run_loop import LengthBook


def test_the_longest_expected_starts_first_and_equal_ones_keep_their_order():
    book = LengthBook()
    for prompt, length in (("short", 5), ("long", 500), ("longer", 900), ("short too", 5)):
        book.observe(prompt, length)
    assert book.longest_first(["short", "long", "short too", "longer"]) == [3, 1, 0, 2]


def test_a_prompt_never_seen_counts_as_the_mean_of_all():
    book = LengthBook()
    for _ in range(1000):
        book.observe("short", 10)
        book.observe("long", 100)
    assert book.longest_first(["short", "new", "long"]) == [2, 1, 0]


def test_the_newest_lengths_count_most():
    book = LengthBook()
    book.observe("shrinks", 1000)
    for _ in range(10):
        book.observe("shrinks", 10)
    book.observe("steady", 50)
    assert book.longest_first(["shrinks", "steady"]) == [1, 0]


def test_the_book_is_bounded_and_forgets_who_was_not_seen_for_longest():
    book = LengthBook(capacity=2)
    book.observe("a", 900)
    book.observe("b", 800)
    book.observe("a", 900)
    book.observe("c", 1)
    assert len(book._means) == 2
    assert set(book._means) == {"a", "c"}
