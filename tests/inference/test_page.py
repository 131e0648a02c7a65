"""The page at `/`, in a browser: what is typed is answered, tokens can be looked at, and what is said is no markup."""

import math
import time

import pytest

from fathom.checkpoints.open import open_checkpoint
from fathom.inference import server
from fathom.inference.page import talk_page
from fathom.lens.live import add_lens
from tests.inference.served import in_thread, scripted
from tests.lens.browser import Browser
from tests.tiny import export_tiny

HOSTILE = (
    '<img src=x onerror="document.title=1"></script><script>document.title=2</script>&amp;\x1b[31mred\u202egnp\u2069'
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def served(tmp_path_factory, browser, request):
    """A model behind its page, which is open; afterwards the page has complained of nothing, and called no other."""
    fields = {"max_position_embeddings": 1024, **getattr(request, "param", {})}
    chat = fields.pop("chat", True)
    own = server.Service(
        *open_checkpoint(export_tiny(tmp_path_factory.mktemp("page") / "tiny", chat, **fields), "cpu"), "tiny"
    )
    browser.complaints.clear()
    browser.requests.clear()
    with in_thread(own, lens=add_lens) as running:
        running.url = f"http://127.0.0.1:{running.port}/"
        browser.open(running.url)
        yield running
        assert browser.complaints == []
        assert all(url.startswith((running.url, "data:")) for url in browser.requests)


def send(browser, text, **settings):
    settings = {"max_tokens": 12, "temperature": 0, **settings}
    for name, value in settings.items():
        browser.value(f"document.getElementById('{name}').value = {str(value)!r}")
    browser.click("#prompt")
    browser.call("Input.insertText", text=text)
    browser.press_enter()


def done(browser):
    browser.until("document.getElementById('stop').hidden && document.querySelectorAll('.t').length > 0")


def text_of(browser, selector):
    return browser.value(f"document.querySelector('{selector}').textContent")


def click_widest(browser):
    """Click the token that is easiest to hit; which it is."""
    width = "t => t.getClientRects().length === 1 ? t.offsetWidth : 0"
    widths = f"[...document.querySelectorAll('.t')].slice(1, -1).map({width})"
    at = browser.value(f"(w => w.indexOf(Math.max(...w)))({widths})") + 1
    browser.click(f".t:nth-child({at + 1})")
    return at


def test_what_is_typed_is_answered_and_a_token_looked_at(served, browser):
    send(browser, "How deep?")
    done(browser)
    first = served.chat("How deep?", logprobs=True, top_logprobs=5).choices[0]
    tokens = first.logprobs.content
    assert browser.value("document.querySelectorAll('.t').length") == len(tokens)
    assert text_of(browser, ".user .text") == "How deep?"
    at = click_widest(browser)
    browser.until("!!document.querySelector('#lens table')")
    assert text_of(browser, "#summary").startswith(f"{-tokens[at].logprob / math.log(2):.2f}"[:3])
    assert browser.value("document.querySelectorAll('#others tr').length") == 5
    assert browser.value("document.querySelectorAll('#lens tbody tr').length") == 4, "one row for each layer"
    last = "document.querySelector('#lens tbody tr:last-child td.w').textContent"
    assert browser.value(last) == text_of(browser, "#others td.w"), "the last layer says what the model says"
    browser.click("#on")
    assert browser.value(f"document.querySelector('.t.here') === document.querySelectorAll('.t')[{at + 1}]")
    browser.value("document.querySelector('.assistant .text').focus()")
    browser.press("ArrowLeft")
    assert browser.value(f"document.querySelector('.t.here') === document.querySelectorAll('.t')[{at}]")
    browser.press("Escape")
    assert browser.value("document.getElementById('panel').hidden")
    send(browser, "And now?")
    browser.until("document.querySelectorAll('.turn.assistant').length === 2")
    done(browser)
    said = [{"role": "user", "content": "How deep?"}, {"role": "assistant", "content": first.message.content}]
    ask = {
        "model": "tiny",
        "max_tokens": 12,
        "temperature": 0,
        "messages": [*said, {"role": "user", "content": "And now?"}],
    }
    again = served.client.chat.completions.create(**ask).choices[0].message.content
    shown = "[...document.querySelectorAll('.assistant .text')].at(-1).textContent"
    plain = "".join(c for c in again if c.isprintable())
    assert "".join(c for c in browser.value(shown) if c in plain)[:20] == plain[:20]


def test_a_text_is_continued(served, browser):
    browser.value("document.querySelector('[value=continue]').click()")
    send(browser, "To fathom")
    done(browser)
    assert browser.value("document.querySelectorAll('.t').length") == 12
    assert "Continued" in text_of(browser, ".assistant b")
    click_widest(browser)
    browser.until("!!document.querySelector('#lens table')")


@pytest.mark.parametrize("served", [{"recurrence": "adaponder", "mixer": "none"}], indirect=True)
def test_iterations_of_a_model_that_halts(served, browser):
    assert not browser.value("document.getElementById('by-trips').hidden")
    send(browser, "How deep?")
    done(browser)
    browser.value("document.querySelector('[value=trips]').click()")
    at = click_widest(browser)
    answer = served.chat("How deep?", extra_body={"return_trips": True}).choices[0]
    assert f"after {answer.trips[at]} iteration" in text_of(browser, "#summary")
    browser.until("!!document.querySelector('#lens table')")
    assert "iter. · layer" in text_of(browser, "#lens thead")


@pytest.mark.parametrize("served", [{"recurrence": "loop", "mixer": "none"}], indirect=True)
def test_the_lens_makes_as_many_iterations_as_the_answer_might(served, browser):
    send(browser, "How deep?", max_trips=1)
    done(browser)
    click_widest(browser)
    browser.until("!!document.querySelector('#lens table')")
    layers = served.service.model.config.num_hidden_layers
    assert browser.value("document.querySelectorAll('#lens tbody tr').length") == layers
    assert "iter." not in text_of(browser, "#lens thead")


@pytest.mark.parametrize("served", [{"chat": False}], indirect=True)
def test_a_model_that_was_not_taught_to_converse_continues(served, browser):
    assert browser.value("document.getElementById('modes').hidden")
    send(browser, "x")
    done(browser)
    assert "continues texts" in text_of(browser, "#facts")


def test_a_long_answer_is_stopped_and_settings_are_checked(served, browser):
    slowly = served.service.model.lm_head.register_forward_hook(lambda *_: time.sleep(0.03))
    browser.value("document.querySelector('[value=continue]').click()")
    send(browser, "x", max_tokens=900)
    browser.until("document.querySelectorAll('.t').length > 2")
    browser.click("#stop")
    browser.until("document.getElementById('stop').hidden")
    slowly.remove()
    assert "stopped" in text_of(browser, "#status")
    assert 2 < browser.value("document.querySelectorAll('.t').length") < 900
    for name, value in (("temperature", "hot"), ("top_p", "7"), ("seed", "1.5")):
        send(browser, "again", **{name: value})
        assert browser.value(f"document.getElementById('{name}').getAttribute('aria-invalid')") == "true"
        assert "number from" in text_of(browser, "#status")
        browser.value(f"document.getElementById('{name}').value = document.getElementById('prompt').value = ''")
    browser.click("#reset")
    assert browser.value("document.querySelectorAll('.turn').length") == 0


def test_an_error_is_shown_and_the_text_kept(served, browser):
    send(browser, "x " * 2000)
    browser.until("document.getElementById('status').classList.contains('bad')")
    assert "context is 1024 tokens" in text_of(browser, "#status")
    assert browser.value("document.querySelectorAll('.turn').length") == 0
    assert browser.value("document.getElementById('prompt').value.length") == 4000
    browser.complaints[:] = [one for one in browser.complaints if "400" not in str(one)]


def test_what_a_model_or_a_user_writes_is_text(served, browser):
    with scripted(served.service, HOSTILE):
        send(browser, HOSTILE, max_tokens=400)
        done(browser)
    assert browser.value("document.title") == "tiny · Fathom"
    assert browser.value("document.querySelectorAll('#said img, #said script').length") == 0
    for selector in (".user .text", ".assistant .text"):
        said = text_of(browser, selector)
        assert '<img src=x onerror="document.title=1"></script>' in said and "&amp;" in said
        assert "\x1b" not in said and "\u202e" not in said and "␛[31mred" in said and "U+202E" in said
    at = browser.value("[...document.querySelectorAll('.t')].findIndex(t => t.textContent.includes('U+202E'))")
    if at >= 0:
        browser.value(f"document.querySelectorAll('.t')[{at}].click()")
        assert "\u202e" not in text_of(browser, "#panel")


def test_a_name_and_the_policy():
    text, headers = talk_page('</script><b>"', 8, 1, True, None)
    assert "</script><b>" not in text and "&lt;/script&gt;" in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert talk_page("a", 8, 1, True, None)[1] != headers, "a nonce is for one page"


@pytest.mark.slow
def test_on_a_phone(served, browser):
    browser.open(served.url, width=390, height=844, touch=True)
    send(browser, "How deep?")
    done(browser)
    browser.tap(".t:nth-child(2)")
    assert not browser.value("document.getElementById('panel').hidden")
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    small = "[...document.querySelectorAll('button')].filter(b => b.offsetHeight && b.offsetHeight < 44).length"
    assert browser.value(small) == 0
