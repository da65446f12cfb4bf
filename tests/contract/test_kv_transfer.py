"""Where a connector keeps keys and values: in with a request, out with the last update of each choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.api import Capability, UnsupportedByEngine
from tests.contract.harness import EngineCase, read_all, request, running

pytestmark = pytest.mark.anyio
PARAMS: dict[str, object] = {"do_remote_decode": True, "remote_port": 5600}


async def test_each_choice_tells_its_own_with_its_end_and_not_before(case: EngineCase) -> None:
    async with (
        running(case, needs=Capability.KV_TRANSFER) as engine,
        engine.submit([replace(request(2), kv_transfer_params=PARAMS), request(1)]) as submission,
    ):
        first, second, other = [last for _, last in await read_all(submission.choices)]
        for last in (first, second):
            assert last.kv_transfer_params is not None and last.kv_transfer_params.items() >= PARAMS.items()
        assert other.kv_transfer_params is None


async def test_engine_without_a_connector_refuses_it(case: EngineCase) -> None:
    async with running(case) as engine:
        asked = replace(request(), kv_transfer_params=PARAMS)
        if Capability.KV_TRANSFER in engine.info.capabilities:
            async with engine.submit([asked]):
                return
        with pytest.raises(UnsupportedByEngine, match="kv_transfer"):
            async with engine.submit([asked]):
                pass
