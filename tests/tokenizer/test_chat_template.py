"""Chat templates render as the model wants; hostile ones hurt nobody but their request."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from minisgl.message import BaseTokenizerMsg, TokenizeMsg, UserMsg
from minisgl.params import ChatTemplateError, InvalidRequestError, SamplingParams
from minisgl.tokenizer import ChatTemplate, TokenizeManager, Tokenizer, load_tokenizer, sandbox

HELLO = [{"role": "user", "content": "Hello"}]
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)


def render(source: str, messages: list[Any] = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_the_default_model_renders_its_conversation(tokenizer: Tokenizer) -> None:
    prompt = SYSTEM + "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(HELLO) == prompt
    without = tokenizer.apply_chat_template(HELLO, add_generation_prompt=False)
    assert without == prompt.removesuffix("<|im_start|>assistant\n")
    ids = tokenizer.apply_chat_template(HELLO, tokenize=True)
    assert ids == tokenizer.encode(prompt)
    assert (ids[:2], ids[-3:]) == ([1, 9690], [1, 520, 9531, 198][-3:])


def test_rendering_equals_the_reference(tokenizer: Tokenizer) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ünï {{ x }}"},
        {"role": "assistant", "content": "  spaced\n"},
        {"role": "strange", "content": ""},
    ]
    tools = [{"name": "f", "täg": [1, 2.5, None, True], "html": "<a href='x'>&"}]
    sources = [
        tokenizer.chat_template,
        "{% for m in messages %}\n    {%- if loop.first %}\n  A{% endif %}\n{{ m['content'] }}\n"
        "{% endfor %}",
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | length }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}"
        "{{ m.role | upper ~ ns.n }}{% endfor %}",
        "{% macro show(m) %}[{{ m.role }}: {{ m.content | trim }}]{% endmacro %}"
        "{% for m in messages[1:] %}{{ show(m) }}{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | tojson }}"
        "{{ 'a-b'.split('-')[1] }}{% set a, b = (1, [2, 3]) %}{{ [a, b] }}{{ {'k': a} }}",
        "{% generation %}{{ messages[2].content.strip() }}{% endgeneration %}"
        "{{ '%s=%d' % ('a', 3) }}{% for k, v in tools[0] | dictsort %}{{ k }}:{{ v }}{% endfor %}",
        "{{ 'x' * 3 }}{{ '{}-{x}'.format(1, x=2) }}{{ 'aXb'.replace('X', '--') }}{{ 7 // 2 ** 1 }}",
    ]
    for source in sources:
        ours = render(str(source), conversation, tools=tools, add_generation_prompt=True)
        theirs = reference.apply_chat_template(
            conversation,
            tools=tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert ours == theirs, source


def test_braces_in_messages_are_only_text(tokenizer: Tokenizer) -> None:
    content = "{{ 7 * 7 }} {% raw %} {# note #} ${x}"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    assert f"<|im_start|>user\n{content}<|im_end|>" in rendered


def test_content_may_be_null_or_parts_of_text() -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "user", "content": []},
    ]
    assert render(source, messages) == "[a\nb][][][]"
    assert messages[0]["content"] is parts


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages must not be empty"),
        (["text"], r"messages\[0\] must be an object with a role"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([*HELLO, {"role": 5, "content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a text"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\].content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is not text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "a part that is not text"),
    ],
)
def test_messages_of_another_shape_are_refused_by_name(messages: list[Any], problem: str) -> None:
    with pytest.raises(ChatTemplateError, match=problem) as caught:
        render("{{ messages[0].content }}", messages)
    assert caught.value.param is not None and caught.value.param.startswith("messages")


HOSTILE = {
    "an endless nest of loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "seconds: does it loop",
    ),
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "seconds: does it loop",
    ),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a recursive loop": (
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "recursion|seconds",
    ),
    "endless output": ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "characters"),
    "a list that holds itself twice, and again": (
        "{% set n = namespace(x=[1]) %}"
        "{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x }}",
        "characters",
    ),
    "a dict that does so": (
        "{% set n = namespace(x=1) %}{% for i in range(99) %}"
        "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x }}",
        "characters",
    ),
    "a call of dict that does so": (
        "{% set n = namespace(x=1) %}{% for i in range(99) %}"
        "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
        "characters",
    ),
    "a namespace that does so": (
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set m = namespace() %}"
        "{% set m.a = n.x %}{% set m.b = n.x %}{% set n.x = m %}{% endfor %}{{ n.x }}",
        "characters",
    ),
    "a namespace that holds itself": (
        "{% set n = namespace() %}{% set n.a = n %}{{ n | string }}",
        "characters",
    ),
    "a sum of lists": ("{{ ([[1]] * 99999) | sum(start=[]) }}", "numbers only"),
    "a number from a text": ("{{ ('f' * 99999) | int(base=16) }}", "number is too large"),
    "a text that doubles": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "characters",
    ),
    "a text that doubles by plus": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "characters",
    ),
    "a list that doubles": (
        "{% set n = namespace(x=[1]) %}"
        "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "items|characters",
    ),
    "a list of large texts": (
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
        "{% set n.x = n.x + ['x' * 999999 ~ i] %}{% endfor %}",
        "characters",
    ),
    "a number that squares": (
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "number is too large",
    ),
    "a text times a billion": ("{{ 'x' * 10 ** 9 }}", "characters"),
    "a billion times a text": ("{{ 1000000000 * 'x' }}", "characters"),
    "a list times a billion": ("{{ [1] * 1000000000 }}", "items"),
    "a tower of powers": ("{{ 9 ** 9 ** 9 ** 9 }}", "power is too large"),
    "a wide percent format": ("{{ '%999999999d' % 1 }}", "format"),
    "a starred percent format": ("{{ '%*d' % (999999999, 1) }}", "format"),
    "a wide format": ("{{ '{:>999999999}'.format(1) }}", "format"),
    "a nested format": ("{{ '{:>{}}'.format(1, 999999999) }}", "format"),
    "a wide format filter": ("{{ '%999999999d' | format(1) }}", "format"),
    "padding": ("{{ 'x'.ljust(999999999) }}", "width"),
    "a padding filter": ("{{ 'x' | center(999999999) }}", "width"),
    "an indentation": ("{{ 'x\ny' | indent(999999999) }}", "width"),
    "indented JSON": ("{{ [1] | tojson(indent=999999999) }}", "width"),
    "tabs": ("{{ '\t'.expandtabs(tabsize=999999999) }}", "width"),
    "slices": ("{{ [1] | slice(999999999) | list }}", "width"),
    "a replacement of nothing": ("{{ ('x' * 9999).replace('', 'y' * 9999) }}", "characters"),
    "a replacing filter": ("{{ ('x' * 9999) | replace('', 'y' * 9999) }}", "characters"),
    "a wide join": ("{{ ('y' * 9999).join('x' * 9999) }}", "characters"),
    "a joining filter": ("{{ range(9999) | join('y' * 9999) }}", "characters"),
    "a huge range": ("{{ range(10 ** 9) | list }}", "too (big|large)"),
    "lorem ipsum": ("{{ lipsum(n=10000) }}", "undefined"),
    "Python's classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "Python's globals": ("{{ cycler.__init__.__globals__.os }}", "unsafe|undefined"),
    "the frame of a generator": ("{{ (messages | map('upper')).gi_frame.f_globals }}", "unsafe"),
    "attributes by filter": ("{{ messages | attr('__class__') | attr('x') | attr('y')() }}", "."),
    "a format that reads attributes": ("{{ '{0.__class__.x}'.format(1) }}", "unsafe|attribute"),
    "changing the messages": ("{{ messages.append(1) }}", "unsafe"),
    "changing a message": ("{{ messages[0].update(content='x') }}", "unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "a base file": ("{% extends '/etc/passwd' %}", "no loader"),
    "division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "an undefined name's attribute": ("{{ nothing.at.all }}", "undefined"),
    "adding text and number": ("{{ 'a' + 1 }}", "fails"),
    "its own refusal": ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
    "an endless date": ("{{ strftime_now('%999999999Y') }}", "format"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error_of_its_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    source, problem = HOSTILE[name]
    template = ChatTemplate(source)
    started = time.process_time()
    with pytest.raises(ChatTemplateError, match=f"{problem}|more than 0.5 seconds") as caught:
        template.render(HELLO)
    assert time.process_time() - started < 2.0
    assert caught.value.param == "messages"
    assert HELLO == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "source",
    [
        '{% set l = range(99999) | list %}{{ l | select("in", l) | list | length }}',
        "{% set l = range(99999) | list %}" + "{{ -1 in l }}" * 2000,
        '{{ ("a" * 4000000) | wordwrap(1) | length }}',
        "{{ a }}" * 100_000,  # its compiler takes long
    ],
    ids=["a test", "an operator", "a filter", "the source"],
)
def test_what_takes_long_without_a_loop_ends_too(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    started = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"takes more than 0\.3 seconds"):
        render(source)
    assert time.process_time() - started < 2.0
    assert render("{{ messages[0].content }}") == "Hello"


def test_a_time_that_is_up_at_the_very_end_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.001)
    num_late = 0
    for i in range(200):
        try:
            sandbox.within_time(lambda: time.sleep(0.0008 + i * 2e-6))  # noqa: B023
        except sandbox.BudgetError:
            num_late += 1
    for _ in range(30):  # whatever were still under way would be raised here
        time.sleep(0.01)
    assert num_late > 0


@pytest.mark.parametrize("name", ["a text that doubles", "a list of large texts", "slices"])
def test_a_greedy_template_gets_little_memory(name: str) -> None:
    template = ChatTemplate(HOSTILE[name][0])
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            template.render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


BROKEN = {
    "no expression": "{% if %}",
    "no end": "{% for m in messages %}",
    "unknown tag": "{% import_os %}",
    "unknown filter": "{{ 1 | nofilter }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "too long": "x" * (1 << 20) + "x",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_does_not_compile_is_a_template_error(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"chat template (is broken|has over)"):
        ChatTemplate(BROKEN[name])


def test_the_insides_of_the_sandbox_cannot_be_reached_or_replaced() -> None:
    assert render("{{ spend }}{{ concatenate }}{{ environment }}{{ self.x }}") == ""
    source = "{% set spend = 1 %}{% for i in [1, 2] %}{{ i }}{% endfor %}"
    assert render(source) == "12"


def test_two_templates_may_render_at_once() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")
    found: list[str] = []

    def work(text: str) -> None:
        found.append(template.render([{"role": "user", "content": text}]))

    threads = [threading.Thread(target=work, args=(text,)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [letter * 2000 for letter in "abcd"]


def test_a_model_without_a_template_says_what_to_do(write_folder: Any) -> None:
    bare = load_tokenizer(write_folder({}))
    with pytest.raises(ChatTemplateError, match=r"has no chat template: send a plain prompt"):
        bare.apply_chat_template(HELLO)


def test_bos_is_never_doubled(write_folder: Any) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"}
    for i, template in enumerate(["{{ bos_token }}a", "a"]):
        folder = write_folder(
            {"tokenizer_config.json": config, "chat_template.jinja": template}, f"m{i}"
        )
        found = load_tokenizer(folder)
        assert found.encode("a") == [256, 64]
        assert found.apply_chat_template(HELLO, tokenize=True) == [256, 64]
        message = TokenizeMsg(0, HELLO, SamplingParams())
        assert TokenizeManager(found).tokenize([message])[0].tolist() == [256, 64]  # type: ignore[union-attr]


def test_each_message_gets_its_ids_or_its_own_error(tokenizer: Tokenizer) -> None:
    inputs: list[Any] = [
        "Hello world!",
        HELLO,
        "",
        [],
        "lone \ud800",
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "\udfff"}],
        "<|im_end|>",
        7,
    ]
    params = SamplingParams()
    found = TokenizeManager(tokenizer).tokenize(
        [TokenizeMsg(uid, text, params) for uid, text in enumerate(inputs)]
    )
    kinds = [type(one) for one in found]
    assert kinds == [
        np.ndarray, np.ndarray, InvalidRequestError, ChatTemplateError, InvalidRequestError,
        ChatTemplateError, InvalidRequestError, np.ndarray, InvalidRequestError,
    ]  # fmt: skip
    first, chat = found[0], found[1]
    assert isinstance(first, np.ndarray) and isinstance(chat, np.ndarray)
    assert first.dtype == np.int32 and first.tolist() == [19556, 905, 17]
    assert chat.tolist() == tokenizer.apply_chat_template(HELLO, tokenize=True)
    assert str(found[2]) == "the prompt is empty: it has no tokens"
    assert found[7].tolist() == [2]  # type: ignore[union-attr]
    assert UserMsg(0, first, params).input_ids.tolist() == [19556, 905, 17]


def test_tools_and_variables_of_a_request_reach_its_template(write_folder: Any) -> None:
    source = (
        "{{ tools | length if tools else 'none' }} {{ enable_thinking | default('unset') }} "
        "{{ add_generation_prompt }} {{ messages[0].content }}"
    )
    found = load_tokenizer(write_folder({"chat_template.jinja": source}))
    read = {"tools", "enable_thinking", "add_generation_prompt", "messages"}
    assert found.template_variables == read
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "none unset True Hello"),
        ({"tools": [{"name": "f"}]}, "1 unset True Hello"),
        ({"template_args": {"enable_thinking": False}}, "none False True Hello"),
        ({"template_args": {"add_generation_prompt": False}}, "none unset False Hello"),
        # names that mean something to us are only variables, and never win over the real values
        (
            {"template_args": {"messages": 1, "self": 2, "tokenize": True, "tools": 3}},
            "none unset True Hello",
        ),
    ]
    for fields, expected in cases:
        message = TokenizeMsg(0, HELLO, SamplingParams(), **fields)
        assert BaseTokenizerMsg.decoder(message.encoder()) == message
        ids = TokenizeManager(found).tokenize([message])[0]
        assert isinstance(ids, np.ndarray), ids
        assert ids.tolist() == found.encode_rendered(expected)


def test_a_template_of_its_own_for_tools_is_taken_when_there_are_tools(
    write_folder: Any, tmp_path: Path
) -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_tiny_vocabulary(writer)
    writer.add_chat_template(listed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    beside = write_folder({"chat_template.jinja": "D"}, "beside")
    (beside / "additional_chat_templates").mkdir()
    (beside / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    listing = write_folder({"tokenizer_config.json": {"chat_template": listed}}, "listed")
    for place in (beside, listing, tmp_path / "m.gguf"):
        found = load_tokenizer(place)
        assert found.apply_chat_template(HELLO) == "D"
        assert found.apply_chat_template(HELLO, [{"name": "f"}]) == "T"
    one = load_tokenizer(write_folder({"chat_template.jinja": "D"}, "one"))
    assert one.apply_chat_template(HELLO, [{"name": "f"}]) == "D"


def add_tiny_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<s>"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1, 3])


def test_a_foreign_tokenizer_that_breaks_spoils_only_its_message(tokenizer: Tokenizer) -> None:
    class Foreign:
        bos_token = None

        def encode(self, text: str) -> list[int]:
            return [12 // len(text)]

    found = TokenizeManager(Foreign()).tokenize(
        [TokenizeMsg(i, text, SamplingParams()) for i, text in enumerate(["a", "", "bb"])]
    )
    first, broken, last = found
    assert isinstance(first, np.ndarray) and first.tolist() == [12]
    assert isinstance(broken, InvalidRequestError)
    assert str(broken) == "the prompt cannot be tokenized"
    assert isinstance(last, np.ndarray) and last.tolist() == [6]
