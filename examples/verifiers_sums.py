"""Environment of verifiers 0.4: sums of three digits, with a calculator that adds two numbers.

A verifiers environment is a module that exports a taskset (which tasks, and what a finished trace of one is worth) and a
harness (the program that talks to the model); verifiers loads it by its name. The conversation about one task:

    user: 7+8+4=    assistant: 7+8    user: 15    assistant: 15+4    user: 19    assistant: 19

An assistant message with a plus is a call of the calculator, any other one is the answer.
"""

from __future__ import annotations

import random
import re
import ssl
from collections.abc import Iterator
from itertools import product
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

__all__ = ["CalculatorHarness", "SumsTaskset"]

TURNS = 5
TLS = ssl.create_default_context()
"""Shared by all clients: making it takes longer than an episode."""


class SumData(vf.TaskData):
    """A question and its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Worth 1 where the last message is the answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1.0 or 0.0."""
        said = trace.nodes[-1].message.content if trace.nodes else None
        return float(said == self.data.answer)


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """All 729 sums of three digits, in an order that is always the same."""

    def load(self) -> Iterator[SumTask]:
        """The tasks; `shuffle` and `take` make others of them."""
        every = list(product(range(1, 10), repeat=3))
        random.Random(0).shuffle(every)
        for digits in every:
            question = "+".join(map(str, digits)) + "="
            yield SumTask(SumData(prompt=question, answer=str(sum(digits))), self.config.task)


def calculate(call: str) -> str:
    """The sum of two numbers written as 12+34, or an asterisk."""
    asked = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", call)
    return str(int(asked[1]) + int(asked[2])) if asked else "*"


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, calculates what it calls for, and asks again, until it answers."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: vf.TaskData,
    ) -> vf.ProgramResult:  # fmt: skip
        """Play one conversation within this process; verifiers records what goes through `endpoint`."""
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        http = DefaultAsyncHttpxClient(verify=TLS)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client:
            for _ in range(TURNS):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = reply.choices[0].message.content or ""
                if "+" not in said:
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": calculate(said)}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
