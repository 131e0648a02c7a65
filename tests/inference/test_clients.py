"""What today's agent libraries send is answered; the libraries that are installed work with a server."""

import json

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.inference.clients import FLOWS, RECORDED, installed, saying, tiny_service
from tests.inference.served import in_thread

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra serve brings it)")
SENT = [json.loads(line) for line in RECORDED.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with in_thread(tiny_service(tmp_path_factory.mktemp("clients"))) as running:
        yield running


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent["name"])
def test_what_agents_send_is_answered(served, sent):
    limit = "max_output_tokens" if sent["path"] == "/v1/responses" else "max_completion_tokens"
    body = {key: value for key, value in sent["body"].items() if key not in ("stream", "stream_options")}
    status, answer = served.post(sent["path"], **{**body, limit: 4})
    assert status == 200, answer
    kind = Response if sent["path"] == "/v1/responses" else ChatCompletion
    assert kind.model_validate(answer).usage.total_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_the_libraries_themselves(served, name):
    flow = FLOWS[name]
    if not installed(flow):
        pytest.skip(f"{flow.package} is not installed")
    with saying(served.service, flow.answers):
        assert flow.run(f"http://127.0.0.1:{served.port}/v1") == list(flow.found)
