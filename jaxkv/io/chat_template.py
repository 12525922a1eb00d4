"""Chat templates: Jinja text that comes with a model, run in a sandbox under Hugging Face's conventions."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's words for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt text for `messages`.

    Raises:
      ValueError: the template is broken, or it rejects these messages.
    """
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    try:
        return env.from_string(template).render(messages=messages, **variables)
    except Exception as error:  # a template is a program of strangers: it can fail in any way
        raise ValueError(f"the chat template failed: {error}") from error
