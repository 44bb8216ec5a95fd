"""`StructuredOutput`: what the text of a completion must be, validated at construction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from rollout.errors import ConfigError, NamedOptions

MAX_CHARACTERS = 2**18
"""Maximum length of a schema, an expression or a grammar: what one request may cost the others is bounded by it."""

WHITESPACE = r"[ \t\r\n]{1,20}"
"""Between the parts of JSON. Bounded, because a model that likes white space would write nothing else."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput(NamedOptions):
    """Constraint on the text of a completion: exactly one of the three fields. Needs the extra `structured`.

    Tokens that no text of the constraint continues with get probability 0 before temperature and filters; log-probs are of
    that distribution. The completion ends when its text is complete, also before `min_tokens`.

    Raises:
        ConfigError: (a `ValueError`) not exactly one field is given, or one is malformed. Whether it compiles is
            checked when a request is added.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    """JSON that fits this schema, given as JSON text, a mapping or a bool; stored as text."""

    regex: str | None = None
    """A text that matches this expression (Rust's syntax, without look-around) from beginning to end."""

    grammar: str | None = None
    """A text of this context-free grammar, in llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping | bool):
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        given = [name for name in _NAMES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"StructuredOutput: {', '.join(given) or 'nothing'} is given: must be one of {', '.join(_NAMES)}"
            )
        (name,) = given
        value = getattr(self, name)
        if not isinstance(value, str) or not value or len(value) > MAX_CHARACTERS:
            raise ConfigError(
                f"StructuredOutput.{name}={value!r:.80}: must be a text of 1 to {MAX_CHARACTERS} characters"
            )
        if name == "json_schema":
            _check_schema(value)

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Self:
        """Return the constraint that the text is one of `choices`.

        Raises:
            ConfigError: there are none, or one is no text or empty, or they are too long.
        """
        if isinstance(choices, str) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise ConfigError(f"choices={choices!r:.80}: must be a list of texts, none of them empty")
        grammar = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        if len(grammar) > MAX_CHARACTERS:
            raise ConfigError(f"choices of {len(grammar)} characters: must have at most {MAX_CHARACTERS} together")
        return cls(grammar=grammar)

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _NAMES if getattr(self, name) is not None)

    def serialize(self) -> dict[str, str]:
        """Return the given field by name."""
        return {self.kind: getattr(self, self.kind)}

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """Return the constraint that `given` (one of them, what `serialize` returned, or None) stands for.

        Raises:
            ConfigError: as the class.
            TypeError: something else.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError
        return cls(**given)


def json_rule(schema: Any, *, lenient: bool = False) -> str:
    """Return the body of a rule of a grammar: JSON that fits `schema`; `lenient`: as far as its keywords are served."""
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}
    return f"%json {json.dumps(schema)}"


_NAMES = tuple(item.name for item in fields(StructuredOutput))


def _json_text(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"StructuredOutput.json_schema={schema!r:.80}: must be a JSON schema: {exc}") from exc


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"StructuredOutput.json_schema={text!r:.80}: must be a JSON schema: {exc}") from exc
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"StructuredOutput.json_schema={text!r:.80}: must be a JSON schema, an object or a bool")
