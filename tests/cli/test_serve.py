"""`genesis serve` as a user meets it: the address, who may ask, and how it ends."""

import http.client
import json
import signal
import socket

import openai
import pytest

from genesis.base.errors import UserError
from genesis.cli.serve import main
from tests.serve.support import START_SECONDS, start

TOKEN = "a-token-of-some-length"
ASKED = {"model": "latest", "prompt": "alpha", "max_tokens": 2}


def test_a_port_that_is_taken_is_told_with_the_remedy(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use: give another by --port, or 0"):
            main([str(run), "--port", str(port), "--device", "cpu"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "reached from other machines: give a token"),
        (["--host", "::"], "reached from other machines: give a token"),
        (["--host", "0.0.0.0", "--token", "short"], "has 5 characters: give at least 16"),
        (["--token", ""], "has 0 characters: give at least 16"),
        (["--token", f" {TOKEN}"], "without spaces"),
        (["--host", "no.such.host.invalid"], "cannot resolve host 'no.such.host.invalid'"),
        (["--host", "192.0.2.1", "--token", TOKEN], "cannot listen on 192.0.2.1"),
        (["--port", "70000"], "port 70000 is out of range"),
        (["--token", TOKEN, "--public"], "has no token"),
        (["--max_models", "0"], "max_models is 0"),
        (["--max_queue", "-1"], "max_queue is -1"),
        (["--max_request_seconds", "nan"], "max_request_seconds is nan"),
        (["--max_modles", "2"], "did you mean --max_models"),
    ],
)
def test_bad_options_are_one_line_with_the_value(arguments, message, run, monkeypatch):
    monkeypatch.delenv("GENESIS_TOKEN", raising=False)
    port = [] if "--port" in arguments else ["--port", "0"]
    with pytest.raises(UserError, match=message) as error:
        main([str(run), *port, "--device", "cpu", *arguments])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("available", "wanted"), [(1, "1 text"), (2**50, "16 texts"), (None, "16 texts")])
def test_the_start_names_the_caches_whose_default_fits_the_memory(run, monkeypatch, capsys, available, wanted):
    monkeypatch.setattr("genesis.cli.serve.available_memory", lambda: available)
    monkeypatch.setattr("genesis.cli.serve.serve", lambda build, sock, announce: announce() or signal.SIGTERM)
    assert main([str(run), "--port", "0", "--device", "cpu"]) == 0
    assert f"up to {wanted} at a time, with caches of up to 0." in capsys.readouterr().out


def test_the_memory_of_beginnings_counts_in_what_is_sized_and_named(run, monkeypatch, capsys):
    monkeypatch.setattr("genesis.cli.serve.available_memory", lambda: 8 * 10**9)
    monkeypatch.setattr("genesis.cli.serve.serve", lambda build, sock, announce: announce() or signal.SIGTERM)
    for gigabytes, wanted in (
        ("0", "16 texts at a time, with caches of up to 0."),
        ("4", "1 text at a time, with caches of up to 4."),
        ("4e0", "1 text at a time, with caches of up to 4."),
        ("4000MB", "1 text at a time, with caches of up to 4."),
    ):
        assert main([str(run), "--port", "0", "--device", "cpu", "--prefix_cache_gb", gigabytes]) == 0
        assert wanted in capsys.readouterr().out


@pytest.mark.parametrize("size", ["-1", "nan", "512 many", "", "inf"])
def test_a_size_that_is_none_is_refused_as_it_was_written(run, size):
    with pytest.raises(UserError, match=rf"'{size}' is no size: write it as 0\.5 \(GB\), 512MB or 512MiB"):
        main([str(run), f"--prefix_cache_gb={size}"])


def test_a_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        main([str(tmp_path / "nowhere"), "--device", "cpu"])


@pytest.mark.slow
def test_a_server_with_a_token_gives_its_page_to_all_and_its_models_to_who_brings_the_token(run, exported):
    with start(run, exported, "--host", "0.0.0.0", GENESIS_TOKEN=TOKEN) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/", headers={"Host": "gpu-box.example.org"})
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
        assert b"genesis" in answer.read()
        connection.close()
        for path, body in (("/v1/models", None), ("/api/models", None), ("/api/status", None), ("/v1/completions", {})):
            status, content, headers = server.ask(path, body)
            assert (status, content["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
            assert server.ask(path, body, {"Authorization": f"Bearer {TOKEN[::-1]}"})[0] == 401
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
            names = [model.id for model in client.models.list()]
            assert f"{run.name}/latest" in names
            assert exported.name in names
            texts = [client.completions.create(**ASKED | {"model": name, "temperature": 0}) for name in names[-2:]]
            assert all(text.choices[0].text for text in texts)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(START_SECONDS) == 0


def test_a_stranger_is_not_told_what_lies_where_on_the_machine(own_run):
    damaged = own_run / "checkpoints" / "step-00000001"
    file = next(damaged.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with start(own_run, "--public", told=f"{damaged}: model.decoder") as server:
        status, content, _ = server.ask("/v1/completions", {**ASKED, "model": damaged.name})
        assert status == 500
        assert content["error"]["message"] == "the model cannot be loaded; see the server's log for the cause"


def test_ctrl_c_ends_a_stream_with_the_reason_and_the_process_with_the_shells_status(run):
    with start(run, "--public", "--max_concurrent", "1", told="genesis: interrupted") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        asked = {**ASKED, "max_tokens": 250, "stream": True, "n": 1, "seed": 1}
        headers = {"Content-Type": "application/json", "Host": "x.hf.space", "Origin": "https://huggingface.co"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("Content-Security-Policy")
        server.process.send_signal(signal.SIGINT)
        events = answer.read().decode().strip().split("\n\n")
        connection.close()
        assert events[-1] == "data: [DONE]" or "server_ending" in events[-1]
        assert server.process.wait(START_SECONDS) == 130
