"""Agents' libraries ask `fathom serve` for tools and schemas: openai, LangChain and litellm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fathom.checkpoints.export import export
from tests.inference.notations import HERMES
from tests.outside.models import build
from tests.processes import Command
from tests.tiny import tiny_tokenizer

AGENTS = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
SERVED = ("vanilla", "depth_attention", "adaponder")


def is_sounding(arguments: Any) -> bool:
    """Whether the tool may be called so."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return set(found) == {"place"} and found["place"] in ("harbour", "reef")


def is_depth(found: dict[str, Any]) -> bool:
    """Whether it follows the schema."""
    return found["place"] in ("harbour", "reef") and 0 <= found["fathoms"] <= 9


@pytest.fixture(scope="module", params=SERVED)
def heard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every client got of a model whose chat template writes tools."""
    place = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HERMES
    directory = export(build(request.param, max_position_embeddings=4096), place / "model", tokenizer)
    server = Command(["serve", str(directory), "--name", "deep", "--port", "0", "--device", "cpu"], place, place)
    try:
        address = server.first_line().split(" at ")[1].split(",")[0]
        script = [AGENTS, Path(__file__).with_name("agent_clients.py"), address]
        offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
        done = subprocess.run(script, env=offline, capture_output=True, text=True, timeout=600)
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openai(heard: dict[str, Any]) -> None:
    for found in heard["openai_tools"].values():
        assert found["name"] == "sound" and is_sounding(found["arguments"])
    assert heard["openai_tools"]["whole"] == heard["openai_tools"]["streamed"]
    assert is_depth(heard["openai_parse"])


def test_langchain(heard: dict[str, Any]) -> None:
    for calls in (heard["langchain_bind_tools"], heard["langchain_stream"]):
        assert [call["name"] for call in calls] == ["sound"] and is_sounding(calls[0]["args"])
    assert all(map(is_depth, heard["langchain_structured"].values()))


def test_an_agent_calls_three_tools_and_then_answers(heard: dict[str, Any]) -> None:
    found = heard["agent_loop"]
    assert len(found["calls"]) == 3 and all(map(is_sounding, found["calls"]))
    assert found["messages"] == 7 and not found["more_calls"] and found["text"]


def test_litellm(heard: dict[str, Any]) -> None:
    found = heard["litellm_tools"]
    assert found["call"]["name"] == "sound" and is_sounding(found["call"]["arguments"])
    assert is_depth(found["parsed"]) and found["stream_is_whole"]
