"""Tests of the core's text handling: tokenising prompts, decoding completions, without blocking other requests."""

from __future__ import annotations

import sys

from rollout.distributed.protocol.messages import Accepted, Update
from tests.distributed.coordinator.job import Job, int32, stretch


def test_a_text_becomes_tokens_that_its_client_hears_before_anything_else():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("hello")
    (text,) = job.text_jobs()
    assert (text.text, text.token_ids) == ("hello", None)
    assert rank.quiet()
    job.core.tokenized(text.job_id, [4, 5], job.now)
    job.carry()
    assign = rank.assigned()
    assert assign.prompt == int32(4, 5)
    rank.progress(stretch(assign, {0: (0, [1])}))
    assert client.hear(Accepted) == Accepted(0, int32(4, 5))
    client.hear(Update)


def test_a_text_that_cannot_be_tokenised_fails_by_name_and_the_others_are_served():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("bad")
    client.submit((1, 2))
    (text,) = job.text_jobs()
    assert rank.assigned().request_id == 1
    job.core.tokenized(text.job_id, ValueError("no tokenizer there"), job.now)
    job.carry()
    failure = client.failed("InvalidRequestError")
    assert failure.text == "request 0 of client 'client': its prompt cannot be tokenised: no tokenizer there"


def test_an_open_text_weighs_what_its_tokens_do():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("text")
    (text,) = job.text_jobs()
    job.core.tokenized(text.job_id, [1] * 100, job.now)
    job.carry()
    assert job.core.peers.clients[client.identity].open_bytes == sys.getsizeof("text") + 400 + 4096 + 129
    rank.finish(rank.assigned(), [3])
    (ended,) = job.text_jobs()
    job.core.detokenized(ended.job_id, ["x"], job.now)
    assert job.core.peers.clients[client.identity].open_bytes == 0


def test_a_text_keeps_its_place_behind_tokens_that_came_before_and_before_those_that_came_after():
    job = Job(tokenizer="made up")
    client = job.client()
    client.submit((1,))
    client.submit("hello")
    client.submit((2,))
    (text,) = job.text_jobs()
    job.core.tokenized(text.job_id, [1], job.now)
    assert job.rank().assigned_ids() == [0, 1, 2]


def test_completions_become_text_and_the_other_samples_do_not_wait_for_it():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit(n=2)
    assign = rank.assigned()
    rank.progress(stretch(assign, {0: (0, [1, 2]), 1: (0, [3])}))
    client.hear(Update)
    rank.progress(stretch(assign, {0: (2, [4]), 1: (1, [5])}, ended=[0]))
    (going_on,) = client.stretches()
    assert going_on.indices == [1]
    (first,) = job.text_jobs()
    assert first.token_ids == [int32(1, 2, 4)]
    rank.progress(stretch(assign, {1: (2, [6])}, ended=[1]))
    (second,) = job.text_jobs()
    assert second.token_ids == [int32(3, 5, 6)]
    job.core.detokenized(second.job_id, ["two"], job.now)
    job.carry()
    (row,) = client.stretches()
    assert (row.indices, row.columns["text"]) == ([1], ["two"])
    assert job.core.peers.clients[client.identity].requests
    job.core.detokenized(first.job_id, [None], job.now)
    job.carry()
    (row,) = client.stretches()
    assert (row.indices, row.columns["text"], row.token_ids) == ([0], [None], int32(4))
    assert not job.core.peers.clients[client.identity].requests


def test_a_text_that_the_engine_has_made_is_passed_on():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit()
    rank.progress(stretch(rank.assigned(), {0: (0, [1])}, ended=[0], text=["done"]))
    assert client.stretches()[0].columns["text"] == ["done"]
    assert job.text_jobs() == []
