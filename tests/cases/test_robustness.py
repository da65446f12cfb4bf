"""C31 to C37: overload, faults and security. Most have tests of their own elsewhere; INDEX says where."""

from __future__ import annotations

import ast
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from engine.fake import FakeEngine
from service.lifespan import Services
from service.templates import PLAIN, Message, TemplateOptions
from service.tokenizer import ByteTokenizer
from tests.service.apps import SETTINGS, check_error
from tests.service.asgi import until
from tests.service.inloop import app_and_client

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"

INDEX = {
    "C31": (
        "tests/faults/test_engine_faults.py::test_a_step_that_raises_ends_every_request_with_an_error_and_liveness_with_503",
        "tests/faults/test_engine_faults.py::test_a_step_that_hangs_turns_probes_red_and_fails_what_is_open_until_it_comes_back",
        "tests/faults/test_engine_faults.py::test_a_long_prefill_is_never_taken_for_a_hang",
        "tests/e2e/test_engine_death.py::test_death_ends_every_request_with_an_error_and_liveness_with_503",
        "tests/e2e/test_startup.py::test_port_answers_while_the_model_loads",
    ),
    "C32": (
        "tests/cases/test_robustness.py::test_c32_a_crowd_is_refused_at_once_and_leaves_nothing_behind",
        "tests/service/test_running.py::test_a_deadline_in_the_queue_is_503_and_costs_no_step",
        "tests/e2e/test_disconnects.py::test_nothing_of_a_request_that_left_the_queue_was_computed",
    ),
    "C33": (
        "tests/cases/test_robustness.py::test_c33_a_prompt_that_takes_long_to_tokenise_holds_up_nobody",
        "tests/engine/test_core.py::test_a_long_prompt_is_computed_in_chunks_beside_running_choices",
        "tests/service/test_requests.py::test_a_large_body_is_decoded_off_the_loop_with_the_same_errors",
    ),
    "C34": (
        "tests/e2e/test_signals.py::test_requests_that_run_finish_and_new_ones_are_refused",
        "tests/e2e/test_signals.py::test_readiness_is_503_on_a_connection_that_was_open_before",
        "tests/e2e/test_signals.py::test_what_the_drain_limit_cuts_ends_with_an_error",
        "tests/e2e/test_signals.py::test_second_signal_ends_it_now",
        "tests/e2e/test_signals.py::test_reader_that_stalls_cannot_hold_the_exit",
        "tests/e2e/test_signals.py::test_hung_engine_cannot_hold_the_exit",
        "tests/e2e/test_startup.py::test_sigterm_while_the_model_loads_ends_with_0",
    ),
    "C35": ("tests/security/test_untrusted_input.py::test_no_url_is_ever_fetched",),
    "C36": (
        "tests/security/test_keys.py::test_every_route_but_the_open_ones_is_denied_without_a_known_key",
        "tests/security/test_keys.py::test_no_other_spelling_of_a_url_gets_past",
        "tests/security/test_leaks.py::test_the_number_of_series_does_not_depend_on_what_clients_send",
    ),
    "C37": (
        "tests/security/test_untrusted_input.py::test_a_model_that_is_not_the_served_one_is_404_and_looked_for_nowhere",
        "tests/security/test_untrusted_input.py::test_fields_that_elsewhere_carry_objects_or_code_are_refused_by_name",
        "tests/security/test_untrusted_input.py::test_the_source_turns_no_bytes_into_objects",
        "tests/security/test_own_templates.py::test_without_the_operators_word_it_is_refused_by_name_and_no_process_starts",
    ),
}


@pytest.mark.parametrize("case", INDEX)
def test_the_tests_of_a_case_are_there(case: str) -> None:
    for named in INDEX[case]:
        path, _, name = named.partition("::")
        body = ast.parse((ROOT / path).read_text()).body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, named


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


@pytest.mark.anyio
async def test_c32_a_crowd_is_refused_at_once_and_leaves_nothing_behind() -> None:
    """The engine stands still: whoever is refused is so without its help, and whoever gives up is in no queue then."""
    gate = anyio.Event()
    settings = replace(SETTINGS, max_num_seqs=8, max_queued_seqs=32)
    engine = FakeEngine(settings.engine_config(), pause=gate.wait)
    refused: list[httpx.Response] = []
    async with app_and_client(settings, engine) as (_, client):

        async def ask() -> None:
            refused.append(await client.post(CHAT, json=chat(n=2)))

        async with anyio.create_task_group() as crowd:
            for _ in range(200):
                crowd.start_soon(ask)
            await until(lambda: len(refused) == 180)
            health = engine.health()
            assert health.num_running + health.num_waiting == 40
            crowd.cancel_scope.cancel()
        for response in refused:
            check_error(response, 429, code="rate_limit_exceeded")
            assert 1 <= int(response.headers["retry-after"]) <= 120
        health = engine.health()
        assert (health.num_running, health.num_waiting, health.pages_held) == (0, 0, 0)
        gate.set()
        assert (await client.post(CHAT, json=chat())).status_code == 200


class SlowTokenizer(ByteTokenizer):
    """Takes until it is told to go on, in whatever thread it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def render_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> list[int]:
        self.entered.set()
        assert self.go_on.wait(30)
        return super().render_chat(messages, options)


@pytest.mark.anyio
async def test_c33_a_prompt_that_takes_long_to_tokenise_holds_up_nobody() -> None:
    async with app_and_client(SETTINGS) as (app, client), anyio.create_task_group() as group:
        services: Services = app.state.services
        services.tokenizer = slow = SlowTokenizer()
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await client.post(CHAT, json=chat()))

        group.start_soon(ask)
        await until(slow.entered.is_set)
        assert (await client.get("/health/ready")).status_code == 200
        other = await client.post("/v1/completions", json={"model": "org/m", "prompt": "hi", "max_tokens": 4})
        assert other.status_code == 200 and answers == []
        slow.go_on.set()
        await until(lambda: bool(answers))
        assert answers[0].status_code == 200
