"""Structured output: the llguidance library computes the tokens that a request's constraint allows next.

An llguidance *matcher* holds the state of a constraint after some tokens. The state depends only on the completion's tokens,
so nothing has to be saved for a preemption, a suspend or a restart.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidRequestError
from rollout.requests.detokenizer import TokenBytes
from rollout.sampling_params import StructuredOutput, json_rule

KEPT = 128
"""The maximum number of compiled constraints that are cached for later requests."""

Bits = NDArray[np.uint8]
"""The masks of K rows over V tokens, [K, ceil(V / 8)]. Bit v % 8 of byte v // 8 is set if token v is allowed next."""


@dataclass(frozen=True, eq=False)
class Allowed:
    """The tokens that the constrained rows of a step may draw next, as masks."""

    rows: list[int]
    """The indices of the constrained rows among the sampled rows of the step, ascending."""
    bits: Bits
    """The mask of allowed tokens of each row in `rows`, one bit per token."""
    failed: dict[int, str]
    """The reasons why rows cannot continue under their constraint, by row. Such a row gets no token."""

    def only(self, row: int, tokens: Sequence[int]) -> bool:
        """Return whether `row` is constrained and no token other than `tokens` is allowed."""
        if row not in self.rows:
            return False
        bits = self.bits[self.rows.index(row)].copy()
        for token in tokens:
            bits[token // 8] &= ~np.uint8(1 << token % 8)
        return not bits.any()


@dataclass(slots=True, eq=False)
class _Matcher:
    """An llguidance matcher (the state of a constraint) that has consumed the first `taken` tokens of its completion."""

    state: Any
    taken: int = 0


class Constraints:
    """The constraints of one engine's completions. A *slot* is the row of a completion in the sequence table.

    `check` may be called from any thread.

    Args:
        tokenizer: a Hugging Face tokenizer; if None, constraints are rejected.
        vocab_size: the size V of the model's vocabulary.
        end_ids: the end-of-text tokens, which are allowed once the text is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [token for token in end_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[StructuredOutput, Any] = OrderedDict()
        self._matchers: dict[int, _Matcher] = {}

    def check(self, constraint: StructuredOutput) -> None:
        """Compile a constraint, unless it is already compiled.

        Raises:
            InvalidRequestError: the constraint does not compile, or there is no suitable tokenizer.
        """
        self._copy_of(constraint)

    def set(self, slot: int, constraint: StructuredOutput | None) -> None:
        """Set the constraint of the completion in a slot. A `constraint` of None removes the slot's constraint."""
        if constraint is not None:
            self._matchers[slot] = _Matcher(self._copy_of(constraint))
        else:
            self._matchers.pop(slot, None)

    def constrains(self, slots: NDArray[np.integer]) -> bool:
        """Return whether the completion in any of these slots has a constraint."""
        return bool(self._matchers) and any(slot in self._matchers for slot in slots.tolist())

    def allowed(
        self,
        slots: NDArray[np.integer],
        tokens: NDArray[np.int32],
        origin: NDArray[np.int32],
        length: NDArray[np.int32],
    ) -> Allowed | None:
        """Return the masks of the rows whose slots are constrained, or None if no slot is constrained.

        Args:
            slots: [R], the slot (row of the sequence table) of each sampled row.
            tokens: [S, C], the prompt and completion tokens of every slot.
            origin: [S], the index of the first completion token of every slot.
            length: [S], the number of tokens of every slot.
        """
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._matchers] if self._matchers else []
        if not rows:
            return None
        words = np.zeros((len(rows), -(-self._vocab_size // 32)), np.int32)
        failed: dict[int, str] = {}
        for place, row in enumerate(rows):
            slot = int(slots[row])
            matcher = self._matchers[slot]
            completion = tokens[slot, origin[slot] : length[slot]]
            matcher.state.consume_tokens(completion[matcher.taken :].tolist())
            matcher.taken = len(completion)
            if not matcher.state.is_error():
                matcher.state.unsafe_compute_mask_ptr(words[place].ctypes.data, words[place].nbytes)
            if matcher.state.is_error():
                words[place] = 0
                failed[row] = f"its structured output cannot be followed: {_why(matcher.state)}"
        return Allowed(rows, words.view(np.uint8), failed)

    # --- compiling --------------------------------------------------------------------------------------------------

    def _copy_of(self, constraint: StructuredOutput) -> Any:
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is None:
                compiled = self._compiled[constraint] = self._compile(constraint)
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(constraint)
            return compiled.deep_copy()

    def _compile(self, constraint: StructuredOutput) -> Any:
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        grammar = _lark(library, constraint)
        # The library limits the cost of compiling a grammar and of computing each mask: a matcher that exceeds a limit
        # reports an error.
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(f"structured: the {constraint.kind} does not compile: {_why(matcher)}")
        first, words = matcher.deep_copy(), np.zeros(-(-self._vocab_size // 32), np.int32)
        first.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if first.is_error() or not words.any():
            raise InvalidRequestError(f"structured: the {constraint.kind} allows no first token: {_why(first)}")
        return matcher

    def _read_vocabulary(self) -> Any:
        if self._tokenizer is None or not self._end_ids:
            missing = "no tokenizer" if self._tokenizer is None else "no end-of-text token"
            raise InvalidRequestError(f"structured: the model has {missing}, which a constraint on its text needs")
        library = _library()
        return library.LLTokenizer(
            library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._end_ids)),
            eos_token=self._end_ids,
        )


class _Vocabulary:
    """A tokenizer in the form that llguidance requires. Added tokens that are not special count as text."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        known = TokenBytes(tokenizer)
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.tokens = [known.of(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({token for token in known.special if token < vocab_size}.union(end_ids))

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text. llguidance requires this method, but its result has no effect, because no tokens are forced."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


_INTERNALS = re.compile(r"\n<state>.*|\n +\d+ \| .*|at \d+\(\d+\): failed to compile JSON schema: ", re.DOTALL)
"""A pattern for the parts of llguidance's messages that do not help users: internal state, and the generated grammar."""


def _why(matcher: Any) -> str:
    why = _INTERNALS.sub("", str(matcher.get_error()))[:500]
    if why == "NoExtensionBias":
        return "no text can continue it here; look for a part that contradicts itself, or refers to itself without end"
    return why or "the tokenizer has no token for it"


def _lark(library: Any, constraint: StructuredOutput) -> str:
    """Return the constraint as a Lark grammar for llguidance.

    The grammar disables forced tokens (tokens added without sampling): they would allow only one tokenization of a text.
    """
    if constraint.json_schema is not None:
        text = f"start: {json_rule(json.loads(str(constraint.json_schema)))}"
    elif constraint.regex is not None:
        text = json.loads(library.LLMatcher.grammar_from_regex(constraint.regex))["grammars"][0]["lark_grammar"]
    else:
        text = str(constraint.grammar)
    return text + '\n%llguidance {"no_forcing": true}\n'


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as exc:
        raise InvalidRequestError(
            "structured: constraints need llguidance, which is not installed: pip install 'rollout-engine[structured]'"
        ) from exc
    return llguidance
