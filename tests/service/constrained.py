"""A fake engine that accepts constraints, whose text is for the test to write: it remembers what was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from engine.api import Capability, Constraint, EngineInfo, Request, Submission
from engine.fake import FakeEngine


class ConstrainedEngine(FakeEngine):
    """batch: the last one that was asked for."""

    batch: tuple[Request, ...] = ()

    @property
    def info(self) -> EngineInfo:
        info = super().info
        return replace(info, capabilities=info.capabilities | {Capability.CONSTRAINTS})

    @property
    def constraints(self) -> list[Constraint | None]:
        return [params.constraint for request in self.batch for params in request.choices]

    @asynccontextmanager
    async def submit(self, batch: Sequence[Request]) -> AsyncIterator[Submission]:
        self.batch = tuple(batch)
        free = [
            replace(request, choices=tuple(replace(params, constraint=None) for params in request.choices))
            for request in batch
        ]
        async with super().submit(free) as submission:
            yield submission
