"""The chat page at `/`, with a view of each token: one HTML file that loads nothing else.

`talk/talk.html.j2` is the page, and `talk/talk.js` its script: it chats, colours tokens, writes out control characters,
and shows what was likely at a token. `lens/live.py` answers what each layer predicts there (`--lens`), and limits the
tokens before it. `gate.py` makes a browser ask for the key as a password.
"""

from __future__ import annotations

import secrets

from fathom.report.templates import render


def talk_page(name: str, context: int, trips: int, chat: bool, lens: bool | None) -> tuple[str, dict[str, str]]:
    """The page and its HTTP headers.

    Args:
        name: What clients call the model.
        context: Maximum length of a text in tokens.
        trips: Maximum loop iterations of a token.
        chat: Whether the model has a chat template.
        lens: Whether /lens is served; None for a model that the lens does not support.
    """
    nonce = secrets.token_urlsafe(16)
    data = {"name": name, "context": context, "trips": trips, "chat": chat, "lens": lens}
    page = render("inference/talk/talk.html.j2", title=f"{name} · Fathom", data=data, nonce=nonce)
    return page, guarded(nonce)


def guarded(nonce: str) -> dict[str, str]:
    """The HTTP headers of a page that loads nothing from elsewhere, and runs only the scripts with this nonce."""
    allowed = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",  # the colour of a token is an inline style
        "script-src": f"'nonce-{nonce}'",
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
    }
    policy = "; ".join(f"{what} {where}" for what, where in allowed.items())
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return {**headers, "Cache-Control": "no-store"}
