"""A server that a test talks to: its raw HTTP, and OpenAI's client."""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from unittest import mock

import openai
import torch
import uvicorn

from fathom.inference import gate, launch, server


class Served:
    def __init__(self, port, pid, key=None, service=None):
        self.port, self.pid, self.service = port, pid, service
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=key or "none", max_retries=0, timeout=60
        )

    def raw(self, method, path, body=None, headers=None):
        """Status and JSON of a request that no client would send."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def post(self, path="/v1/completions", **body):
        return self.raw("POST", path, json.dumps(body))

    def complete(self, prompt, **options):
        options = {"max_tokens": 12, "temperature": 0, **options}
        return self.client.completions.create(model="tiny", prompt=prompt, **options)

    def chat(self, text, **options):
        options = {"max_tokens": 12, "temperature": 0, **options}
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="tiny", messages=messages, **options)

    def hang_up(self, **body):
        """Send a request and leave before it is answered; of a stream, after its first words."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            raw = json.dumps(body).encode()
            lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            head = "\r\n".join([*lines, f"Content-Length: {len(raw)}", "", ""])
            connection.sendall(head.encode() + raw)
            if body.get("stream"):
                assert b"200 OK" in connection.recv(1000)
            else:
                time.sleep(0.03)


@contextlib.contextmanager
def in_thread(service, **app):
    """A service in this process, as an application with these settings."""
    listener = launch._bind("127.0.0.1", 0)
    running = uvicorn.Server(uvicorn.Config(server.build_app(service, **app), log_level="warning", http=gate.Timed))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    while not running.started:
        time.sleep(0.01)
    try:
        yield Served(listener.getsockname()[1], os.getpid(), app.get("api_key"), service)
    finally:
        running.should_exit = True
        thread.join()
        service.engine.join(10)


@contextlib.contextmanager
def scripted(service, text):
    """The model says a text, token by token, and then ends; a token that the grammar forbids is not said."""
    tokens = [*service.tokenizer.encode(text, add_special_tokens=False), 0]
    left = iter(tokens)

    def head(module, given, logits):
        if logits.shape[-2] > 1:
            return logits
        row = torch.full_like(logits, -1.0)
        row[..., next(left, 0)] = 1.0
        return row

    service.engine.call(lambda: None).result(60)  # a step of an answer that has just been given up is over
    hook = service.model.lm_head.register_forward_hook(head)
    try:
        with mock.patch("fathom.inference.engine.chunk", return_value=4096):  # a prompt is one chunk
            yield
    finally:
        hook.remove()
