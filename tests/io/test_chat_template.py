"""Chat templates: the conventions that models' makers use, errors, and the sandbox."""

import pytest
from model_files import CHAT, HELLO, spm

from jaxkv.io.tokenizer import Tokenizer


def with_template(template: str) -> Tokenizer:
    return Tokenizer(
        spm({"a": 0.0}),
        bos_token_id=1,
        prefix=[1],
        chat_template=template,
        special_tokens={"bos_token": "<s>"},
    )


def test_chat_template_conventions():
    tokenizer = with_template(CHAT)
    assert tokenizer.apply_chat_template(HELLO) == "<s>[user]hello\n[assistant]"
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == "<s>[user]hello\n"
    assert tokenizer.encode_chat(HELLO).count(1) == 1
    assert with_template("hi").encode_chat(HELLO)[0] == 1
    assert with_template("{% if true %}\n  x\n  {% endif %}\ny").apply_chat_template([]) == "  x\ny"
    assert with_template("{{ {'a': 'é<'} | tojson }}").apply_chat_template([]) == '{"a": "é<"}'
    assert with_template("{% generation %}x{% endgeneration %}").apply_chat_template([]) == "x"
    assert (
        with_template("{% for i in [1, 2] %}{% break %}{% endfor %}{{ tools | length }}").apply_chat_template([], tools=[1]) == "1"
    )
    assert len(with_template("{{ strftime_now('%Y') }}").apply_chat_template([])) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "the chat template failed"),
        ("{{ messages[0].content.x.y }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 1 / 0 }}", "failed"),
    ],
)
def test_chat_template_errors_and_sandbox(template, message):
    with pytest.raises(ValueError, match=message):
        with_template(template).apply_chat_template(HELLO)
