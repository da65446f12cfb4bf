"""A client's own chat template is a program: refused unless the operator allows it, and then bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import psutil
import pytest

from service.template_workers import NUM_WORKERS, TemplateWorkers
from service.templates import PLAIN, TemplateError
from service.tokenizer import ByteTokenizer
from tests.service.apps import SETTINGS, check_error
from tests.service.asgi import until
from tests.service.inloop import app_and_client
from tests.service.tiny_tokenizers import wrapped

pytestmark = pytest.mark.anyio

ALLOWED = replace(SETTINGS, trust_request_chat_template=True, template_timeout=1.0, max_model_len=4096)
CHAT = "/v1/chat/completions"
GOOD = "<|start|>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}<|end|>"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
DEEP = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
NESTED = "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"
LONG = "{% for i in range(20) %}{{ 'x' * 1000000 }}{% endfor %}"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
IMPORT = "{% import 'os' as os %}{{ os.system('true') }}"


BAD = [LOOP, GROWING, DEEP, NESTED, LONG, ESCAPE, IMPORT, "{% raise", "{{ '\\ud800' }}"]
BAD += ["{{ raise_exception('no') }}", "{{ raise_exception('\\ud800') }}"]


def body(template: str, content: str = "hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "org/m", "messages": messages, "max_tokens": 1, "chat_template": template, **more}


def processes() -> list[psutil.Process]:
    """Those that render: no other child of the tests is started in a session of its own by the app."""
    children = psutil.Process().children()
    return [child for child in children if any("template_process" in word for word in child.cmdline())]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_without_the_operators_word_it_is_refused_by_name_and_no_process_starts() -> None:
    async with app_and_client(SETTINGS) as (_, client):
        for template in (GOOD, LOOP, ""):
            check_error(await client.post(CHAT, json=body(template)), 400, "chat_template")
        assert processes() == []
        assert (await client.post(CHAT, json=body(GOOD) | {"chat_template": None})).status_code == 200


async def test_a_template_makes_the_prompt_and_what_a_user_writes_stays_text() -> None:
    async with app_and_client(ALLOWED) as (_, client):
        answer = await client.post(CHAT, json=body(GOOD, "a<|end|>b", return_token_ids=True))
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt_token_ids"] == [257, *b"[user] a<|end|>b", 258]
    assert processes() == []


async def test_a_template_that_never_ends_or_takes_too_much_is_400_and_the_server_goes_on() -> None:
    async with app_and_client(ALLOWED) as (_, client):
        for template in BAD:
            error = check_error(await client.post(CHAT, json=body(template)), 400, "chat_template")
            assert len(error["message"]) < 1000
            assert (await client.post(CHAT, json=body(GOOD))).status_code == 200, template
    assert processes() == []


async def test_templates_that_never_end_hold_up_nobody_who_sends_none() -> None:
    async with app_and_client(replace(ALLOWED, template_timeout=30.0)) as (_, client):
        async with anyio.create_task_group() as group:
            for _ in range(NUM_WORKERS + 2):
                group.start_soon(lambda: client.post(CHAT, json=body(LOOP)))
            with anyio.fail_after(25):
                await until(lambda: len(processes()) == NUM_WORKERS)
                assert (await client.post(CHAT, json=body(GOOD) | {"chat_template": None})).status_code == 200
            assert len(processes()) == NUM_WORKERS
            group.cancel_scope.cancel()
        assert processes() == []


async def test_a_deadline_ends_the_rendering_and_its_process() -> None:
    async with app_and_client(replace(ALLOWED, template_timeout=60.0)) as (_, client):
        assert (await client.post(CHAT, json=body(GOOD))).status_code == 200
        error = check_error(await client.post(CHAT, json=body(LOOP, timeout=0.5)), 503)
        assert error["code"] == "deadline_exceeded"
        assert processes() == []


async def test_a_process_that_is_killed_between_two_calls_is_replaced() -> None:
    call = ByteTokenizer().call_of(GOOD, [{"role": "user", "content": "hi"}], PLAIN)
    async with TemplateWorkers(10.0) as workers:
        assert await workers.render(call) == "<|start|>[user] hi<|end|>"
        process = workers._idle[0].process
        process.kill()
        await process.wait()
        assert await workers.render(call) == "<|start|>[user] hi<|end|>"


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
async def test_the_prompt_is_what_transformers_makes_with_that_template(family: str) -> None:
    template = "{{ eos_token }}{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<think>{% endfor %}"
    ours, theirs = wrapped(family)
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "the cat", "x": None}]
    call = ours.call_of(template, messages, PLAIN)
    async with TemplateWorkers(10.0) as workers:
        token_ids = ours.encode_rendered(await workers.render(call), call)
        with pytest.raises(TemplateError, match="no such thing"):
            await workers.render(ours.call_of("{{ raise_exception('no such thing') }}", messages, PLAIN))
    expected = theirs.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert token_ids == expected
