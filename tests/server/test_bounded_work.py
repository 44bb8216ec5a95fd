"""Tests of bounded work: the cost of a refused request, counted in operations, and isolation of other clients."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import httpx
import pytest

from rollout.errors import InvalidRequestError
from rollout.server import bodies
from rollout.server.bodies import LARGE
from rollout.server.chat_template.prompt_ids import PromptTokenizer
from tests.engines import PATIENCE_S, until
from tests.server.fake_llm import FakeTokenizer, served
from tests.server.requests_by_hand import asked

# --- texts that cannot fit ----------------------------------------------------------------------------------------------


class CountingTokenizer(FakeTokenizer):
    """Bytes; remembers how many characters it was given at a time, and by which thread."""

    eos_token_id = 256
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    chat_template = None

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: set[int] = set()
        self.meanwhile = threading.Event()
        self.meanwhile.set()

    def __deepcopy__(self, memo: Any) -> CountingTokenizer:
        return self

    def __len__(self) -> int:
        return 257

    def get_vocab(self) -> dict[str, int]:
        return {"longest": 0, "a": 1}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        if text:
            self.read.append(len(text))
        self.threads.add(threading.get_ident())
        assert self.meanwhile.wait(PATIENCE_S)
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: Any, tokenize: bool = True) -> str:
        return ""


def test_more_characters_than_the_longest_tokens_cover_are_refused_unread():
    tokenizer = CountingTokenizer()
    reader = PromptTokenizer(tokenizer, lambda: 10)
    assert len(reader.ids("a" * 70, "prompt")) == 70
    with pytest.raises(InvalidRequestError, match=r"prompt: 71 characters, and max_sequence_length=10 tokens .* 70"):
        reader.ids("a" * 71, "prompt")
    assert tokenizer.read == [70]


# --- on the loop, and beside it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [LARGE // 2, 2 * LARGE])
def test_a_large_body_is_read_beside_the_loop(length: int, monkeypatch: pytest.MonkeyPatch):
    parsing: set[int] = set()
    parsed = bodies._parsed
    monkeypatch.setattr(bodies, "_parsed", lambda *both: parsing.add(threading.get_ident()) or parsed(*both))
    tokenizer = CountingTokenizer()
    with served(tokenizer) as (llm, server):
        llm.max_sequence_length = 4 * LARGE
        tokenizer.threads.clear()
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * length})
        assert reply.status_code == 200, reply.text
        loops = {llm.loop.run_sync(ident(), PATIENCE_S)}
        assert (parsing == loops, tokenizer.threads == loops) == (length < LARGE, length < LARGE)


async def ident() -> int:
    return threading.get_ident()


def test_while_a_text_is_read_others_are_answered_and_its_client_may_leave():
    tokenizer = CountingTokenizer()
    with served(tokenizer) as (llm, server):
        tokenizer.meanwhile.clear()
        llm.max_sequence_length = 9 * LARGE
        try:
            with asked(server, prompt="a" * (4 * LARGE)):
                while not tokenizer.read:
                    assert httpx.get(f"{server.url}/health").status_code == 200
                assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]}).status_code == 200
            until(lambda: '"/v1/completions",status="499"} 1.0' in httpx.get(f"{server.url}/metrics").text)
        finally:
            tokenizer.meanwhile.set()
    assert [len(prompt) for prompt, *_ in llm.submitted] == [1]


def test_parameters_that_are_the_same_for_many_prompts_are_checked_once(monkeypatch: pytest.MonkeyPatch):
    from rollout.server.openai.schema import CompletionRequest

    made: list[int] = []
    make = CompletionRequest.sampling_params
    monkeypatch.setattr(
        CompletionRequest, "sampling_params", lambda self, **more: made.append(len(self.prompts)) or make(self, **more)
    )
    with served() as (llm, server):
        body = {"prompt": [[1]] * 500, "logit_bias": {str(token): 1 for token in range(200)}}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        # The thread of a client that has left may still read a prompt of its own.
        assert (len(llm.submitted), made.count(500)) == (500, 1)
