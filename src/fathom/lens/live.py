"""The lens in a running server: the page at `/lens`, and the route that computes its numbers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from fathom.errors import SettingsError
from fathom.inference.api import ApiError, PlaceBody
from fathom.inference.prompt import encode
from fathom.lens.look import LensData, look, require_decoder
from fathom.lens.page import lens_page, pack
from fathom.lens.place import look_at

if TYPE_CHECKING:
    from fathom.inference.server import Service

TEXT = "To fathom: to measure a depth; to understand after much thought."
"""The text that the page shows at first."""


def add_lens(app: FastAPI, service: Service) -> None:
    """Offer the lens at /lens."""
    model, tokenizer, name = service.model, service.tokenizer, service.name
    context = model.config.max_position_embeddings
    require_decoder(model)

    async def looked(text: str) -> LensData:
        # Shielded: the thread cannot be stopped, and cancelling would leave its result without a reader.
        return await asyncio.shield(
            asyncio.wrap_future(service.engine.call(partial(look, model, tokenizer, text, name=name)))
        )

    @app.get("/lens")
    async def page() -> HTMLResponse:
        return HTMLResponse(lens_page(await looked(TEXT), live_endpoint="/lens/data"))

    @app.post("/lens/place")
    async def place(body: PlaceBody) -> dict[str, object]:
        trips = service.trips(body.max_trips)
        work = partial(look_at, model, tokenizer, body.tokens, body.said, trips)
        try:
            return await asyncio.shield(asyncio.wrap_future(service.engine.call(work)))
        except SettingsError as error:
            raise ApiError(400, str(error), param="tokens") from error

    @app.post("/lens/data")
    async def data(body: dict) -> JSONResponse:
        text = body.get("text")
        if not isinstance(text, str):
            raise ApiError(400, "text: must be a string", param="text")
        # A text that is much too long is refused on a thread of its own: on the engine's, every other client would
        # wait.
        if text:
            await service.encoded("text", len(text), partial(encode, tokenizer, text, {}, context))
        try:
            return JSONResponse(pack(await looked(text)))
        except (SettingsError, UnicodeError) as error:
            raise ApiError(400, " ".join(str(error).split()), param="text") from error
