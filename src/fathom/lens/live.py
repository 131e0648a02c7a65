"""The lens (what a model computes for a text) in a running server: the page `/lens`, and the routes behind it.

The page posts to `/lens/data` (`lens.js`), the chat page to `/lens/place` (`inference/talk/talk.js`).
`inference/background.py` runs the lens in slices, between which the server generates tokens.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from fathom.errors import SettingsError
from fathom.inference.api import ApiError, PlaceBody
from fathom.inference.background import Background, Breathe
from fathom.inference.page import guarded
from fathom.inference.prompt import encode
from fathom.lens.look import LensData, look, require_decoder
from fathom.lens.page import lens_page, pack
from fathom.lens.place import look_at

if TYPE_CHECKING:
    from fathom.inference.server import Service

TEXT = "To fathom: to measure a depth; to understand after much thought."
"""The text that the page shows at first."""
LONGEST = 512
"""Most tokens of a text whose numbers are computed while others are served."""
PLACE = 2048
"""Most tokens before one place: a slice is a layer, which takes longer for more."""


def add_lens(app: FastAPI, service: Service) -> None:
    """Offer the lens at /lens."""
    model, tokenizer, name = service.model, service.tokenizer, service.name
    longest = min(LONGEST, model.config.max_position_embeddings)
    require_decoder(model)
    background = Background(service.engine)

    async def looked(text: str) -> LensData:
        def work(breathe: Breathe) -> LensData:
            return look(model, tokenizer, text, name=name, breathe=breathe)

        return await background.run(work)

    @app.get("/lens")
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        made = lens_page(await looked(TEXT), live_endpoint="/lens/data", nonce=nonce)
        return HTMLResponse(made, headers=guarded(nonce))

    @app.post("/lens/place")
    async def place(body: PlaceBody) -> dict[str, object]:
        trips = service.trips(body.max_trips)
        if len(body.tokens) > PLACE:
            message = f"tokens: {len(body.tokens)}; the lens of a server takes {PLACE:,} before a place"
            raise ApiError(400, message, "context_length_exceeded", "tokens")
        try:
            return await background.run(partial(look_at, model, tokenizer, body.tokens, body.said, trips))
        except SettingsError as error:
            field = str(error).partition(":")[0]
            raise ApiError(400, str(error), param=field if field in PlaceBody.model_fields else None) from error

    @app.post("/lens/data")
    async def data(body: dict) -> JSONResponse:
        text = body.get("text")
        if not isinstance(text, str):
            raise ApiError(400, "text: must be a string", param="text")
        if text:
            ids = await service.encoded("text", len(text), partial(encode, tokenizer, text, {}, longest))
            if len(ids) > longest:
                message = f"text: {len(ids)} tokens; the lens of a server takes {longest} (`fathom lens` takes more)"
                raise ApiError(400, message, "context_length_exceeded", "text")
        try:
            return JSONResponse(pack(await looked(text)))
        except (SettingsError, UnicodeError) as error:
            raise ApiError(400, " ".join(str(error).split()), param="text") from error
