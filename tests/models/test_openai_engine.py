"""The chat/completions engine against a local server: what it sends, what it makes of answers, and what goes wrong."""

import contextlib
import json
import math
import socket
import time

import numpy as np
import pytest

from fakeserver import servers
from forethought.errors import ConfigError, EngineError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.openai_engine import OpenAIEngine, _retry_after
from forethought.models.tiny import char_tokenizer
from forethought.tree.tree import Kind, Stop, TokenTree


def completion(*texts, reason="stop", usage=(7, 3), **message):
    out = {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {"index": i, "message": {"role": "assistant", "content": t, **message}, "finish_reason": reason}
            for i, t in enumerate(texts)
        ],
    }
    return out | ({"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}} if usage else {})


@pytest.fixture
def serve(monkeypatch):
    with servers(monkeypatch) as start:
        yield start


def ok(*texts, **kw):
    return 200, {}, completion(*texts, **kw)


def engine_for(server, **kw):
    return OpenAIEngine(server.url, "some-model", **{"pause": 0.001, "timeout": 5.0, **kw})


def ask(engine, text="What is 7 + 5?", n=1, sampling=None):
    tree, leaf = engine.renderer.start([{"role": "user", "content": text}], task="t")
    (nodes,) = engine.extend([(tree, leaf)], n, sampling or Sampling(max_tokens=16))
    return tree, nodes


# -- what is sent and what comes of it -------------------------------------------------------------------------------


def test_request_and_nodes(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " secret\n")
    server = serve(lambda body, i: ok("12", "twölve"))
    engine = engine_for(server, extra={"top_k": 5})
    tree, leaf = engine.renderer.start(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "7 + 5?"}]
    )
    sampling = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, stop=("\n",), seed=3)
    (nodes,) = engine.extend([(tree, leaf)], 2, sampling)
    (body,) = server.seen
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "7 + 5?"}],
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["\n"],
        "top_k": 5,
    }
    assert server.paths == ["/v1/chat/completions"] and server.keys == ["Bearer secret"]
    assert [engine.renderer.text(tree.node_ids(n)) for n in nodes] == ["12", "twölve"]
    assert [tree.parent[n] for n in nodes] == [leaf, leaf]
    assert all(tree.sampled[n] and tree.kind[n] == Kind.ASSISTANT and tree.stop[n] == Stop.EOS for n in nodes)
    assert tree.node_ids(nodes[0])[-1] == engine.renderer.end_id
    assert np.isnan(tree.logprob).all()
    assert (engine.stats.tokens_prefilled, engine.stats.tokens_generated, engine.stats.requests) == (7, 3, 2)
    assert "secret" not in json.dumps(tree.meta) + repr(vars(engine))


def test_no_key_is_no_header_and_greedy_is_zero(serve):
    server = serve(lambda body, i: ok("x"))
    ask(engine_for(server), sampling=Sampling(temperature=0))
    assert server.keys == [None]
    assert server.seen[0]["temperature"] == 0 and "top_p" not in server.seen[0] and "stop" not in server.seen[0]


def test_the_next_turn_sends_the_whole_conversation(serve):
    server = serve(lambda body, i: ok(f"answer {i}"))
    engine = engine_for(server)
    tree, (node,) = ask(engine, "first")
    later = engine.renderer.extend_turn(tree, node, "second")
    engine.extend([(tree, later)], 1, Sampling())
    assert server.seen[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "second"},
    ]


def test_nodes_follow_the_order_of_the_leaves_not_of_the_answers(serve):
    def reply(body, i):
        text = body["messages"][0]["content"]
        time.sleep(0.15 if text == "a" else 0)
        return ok(text.upper())

    engine = engine_for(serve(reply))
    leaves = [engine.renderer.start([{"role": "user", "content": t}]) for t in "abcd"]
    seen = []
    got = engine.extend(leaves, 1, Sampling(), progress=lambda done, total: seen.append((done, total)))
    assert [engine.renderer.text(t.node_ids(n)) for (t, _), (n,) in zip(leaves, got, strict=True)] == list("ABCD")
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_two_leaves_of_one_tree(serve):
    engine = engine_for(serve(lambda body, i: ok(body["messages"][-1]["content"] * 2)))
    tree = TokenTree()
    leaves = [(tree, tree.add(0, engine.renderer.encode(t), kind=Kind.USER)) for t in ("x", "y")]
    got = engine.extend(leaves, 1, Sampling())
    assert [engine.renderer.text(tree.node_ids(n)) for (n,) in got] == ["xx", "yy"]


def test_a_server_that_gives_one_choice_at_a_time(serve):
    server = serve(lambda body, i: ok(f"c{i}"))
    engine = engine_for(server)
    tree, nodes = ask(engine, n=3)
    assert [engine.renderer.text(tree.node_ids(n)) for n in nodes] == ["c0", "c1", "c2"]
    assert [b["n"] for b in server.seen] == [3, 2, 1]
    assert len({b["seed"] for b in server.seen}) == 3
    assert engine.stats.tokens_generated == 9


def test_a_server_that_gives_too_many(serve):
    engine = engine_for(serve(lambda body, i: ok("a", "b", "c")))
    assert len(ask(engine, n=2)[1]) == 2


def test_seeds_differ_between_leaves_and_repeat_between_runs(serve):
    server = serve(lambda body, i: ok("x"))
    engine = engine_for(server)
    tree, (first,) = ask(engine)
    engine.extend([(tree, 0)], 1, Sampling(max_tokens=16))
    ask(engine)
    seeds = [b["seed"] for b in server.seen]
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize(
    ("answer", "stop", "text", "meta"),
    [
        (completion("par", reason="length"), Stop.LENGTH, "par", {}),
        (
            completion("x", reason="content_filter"),
            Stop.ERROR,
            "x",
            {"error": "the server's content filter cut the answer"},
        ),
        (completion(None, refusal="I will not"), Stop.EOS, "", {"refusal": "I will not"}),
        (completion("12", reasoning_content="7+5"), Stop.EOS, "12", {"reasoning_content": "7+5"}),
    ],
)
def test_finish_reasons(serve, answer, stop, text, meta):
    engine = engine_for(serve(lambda body, i: (200, {}, answer)))
    if stop == Stop.ERROR:  # beside a sample that went well
        answer["choices"].append(completion("y")["choices"][0])
    tree, nodes = ask(engine, n=len(answer["choices"]))
    node = nodes[0]
    assert (tree.stop[node], engine.renderer.text(tree.node_ids(node)), tree.meta[node]) == (stop, text, meta)
    assert (tree.node_ids(node)[-1:] == [engine.renderer.end_id]) == (stop == Stop.EOS)


def test_a_stop_string_that_the_server_names(serve):
    answer = completion("one")
    answer["choices"][0]["stop_reason"] = "\n"
    tree, (node,) = ask(engine_for(serve(lambda body, i: (200, {}, answer))), sampling=Sampling(stop=("\n",)))
    assert tree.stop[node] == Stop.STRING and tree.length[node] == 3


def test_answers_without_usage_are_counted_by_the_tokenizer(serve):
    engine = engine_for(serve(lambda body, i: ok("four", usage=None)))
    ask(engine)
    assert (engine.stats.tokens_generated, engine.stats.tokens_prefilled, engine.http.without_usage) == (5, 0, 1)


def test_another_tokenizer(serve):
    renderer = ChatRenderer(char_tokenizer("abc ?"))
    engine = engine_for(serve(lambda body, i: ok("cab")), renderer=renderer)
    tree, (node,) = ask(engine, "abc?")
    assert tree.node_ids(node) == [*renderer.encode("cab"), 2]
    strange = engine_for(serve(lambda body, i: ok("xyz")), renderer=renderer)
    with pytest.raises(EngineError, match="an answer cannot be shown in this vocabulary"):
        ask(strange, "abc?")


# -- what goes wrong -------------------------------------------------------------------------------------------------


def first_then_ok(bad):
    return lambda body, i: bad if i == 0 else ok("fine")


def close_at_once(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def half_a_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "bad",
    [
        (429, {"Retry-After": "0"}, {"error": {"message": "slow down"}}),
        (429, {}, b"slow down"),
        (500, {}, b"<html>oops</html>"),
        (503, {}, b""),
        (200, {}, b'{"choices": [{"mess'),
        (200, {}, b"<html>a proxy's page</html>"),
        (200, {}, b"\xff\xfe"),
        (200, {}, b"[]"),
        (200, {}, b"null"),
        (200, {}, {"choices": []}),
        (200, {}, {"choices": [{"text": "the older protocol"}]}),
        (200, {}, {"choices": [{"message": {"content": ["no", "text"]}}]}),
        (200, {}, {"error": {"message": "overloaded"}}),
        close_at_once,
        half_a_body,
    ],
)
def test_passing_faults_are_tried_again(serve, bad):
    server = serve(first_then_ok(bad))
    engine = engine_for(server)
    tree, (node,) = ask(engine)
    assert engine.renderer.text(tree.node_ids(node)) == "fine" and tree.stop[node] == Stop.EOS
    assert len(server.seen) == 2 and server.seen[0] == server.seen[1]
    assert (engine.http.attempts, engine.http.retries, engine.http.failures) == (2, 1, 0)
    assert engine.stats.tokens_generated == 3


def test_a_server_that_hangs(serve):
    engine = engine_for(serve(lambda body, i: (lambda handler: time.sleep(3)) if i == 0 else ok("fine")), timeout=0.3)
    began = time.monotonic()
    tree, (node,) = ask(engine)
    assert engine.renderer.text(tree.node_ids(node)) == "fine"
    assert time.monotonic() - began < 3


def test_a_server_that_drips(serve):
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(40):
                handler.wfile.write(b" ")
                handler.wfile.flush()
                time.sleep(0.1)

    engine = engine_for(serve(lambda body, i: drip), timeout=0.35, attempts=2)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"every request failed; the last one: no answer within 0.35 s \(tried 2 times\)"
    ):
        ask(engine)
    assert time.monotonic() - began < 3


def test_what_the_server_asks_for_is_waited(serve):
    server = serve(first_then_ok((429, {"Retry-After": "0.3"}, b"")))
    began = time.monotonic()
    ask(engine_for(server))
    assert time.monotonic() - began >= 0.3


def test_pauses_grow(serve):
    engine = engine_for(serve(lambda body, i: (500, {}, b"")), attempts=4, pause=0.05)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"HTTP 500: Internal Server Error \(tried 4 times\)"):
        ask(engine)
    assert 0.35 <= time.monotonic() - began < 3  # 0.05 + 0.1 + 0.2, up to a quarter more
    assert (engine.http.attempts, engine.http.failures) == (4, 1)


def test_a_failed_request_does_not_cost_its_siblings(serve):
    server = serve(
        lambda body, i: (500, {}, b"broken") if body["messages"][0]["content"] == "bad" else ok("fine", "too")
    )
    engine = engine_for(server, attempts=2)
    good, bad = (engine.renderer.start([{"role": "user", "content": t}]) for t in ("good", "bad"))
    got = engine.extend([good, bad], 2, Sampling())
    assert [good[0].stop[n] for n in got[0]] == [Stop.EOS, Stop.EOS]
    assert [bad[0].stop[n] for n in got[1]] == [Stop.ERROR, Stop.ERROR]
    assert [bad[0].meta[n] for n in got[1]] == [{"error": "HTTP 500: broken (tried 2 times)"}] * 2
    assert [int(bad[0].length[n]) for n in got[1]] == [0, 0]


def test_samples_that_came_before_the_fault_are_kept(serve):
    engine = engine_for(serve(lambda body, i: ok("one") if i == 0 else (500, {}, b"")), attempts=2)
    tree, nodes = ask(engine, n=3)
    assert [tree.stop[n] for n in nodes] == [Stop.EOS, Stop.ERROR, Stop.ERROR]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            401,
            {"error": {"message": "bad key", "code": "invalid_api_key"}},
            "HTTP 401: bad key invalid_api_key; set OPENAI_API_KEY",
        ),
        (403, b"", "HTTP 403: Forbidden; the key in OPENAI_API_KEY may not use this model"),
        (
            404,
            {"error": "no such model"},
            "HTTP 404: no such model; check base_url and that the server has a model 'some-model'",
        ),
        (400, {"detail": "n must be 1"}, r'HTTP 400: {"detail": "n must be 1"}; check the request'),
        (422, b"temperature too high", "HTTP 422: temperature too high"),
    ],
)
def test_what_no_repetition_mends_raises_at_once(serve, status, body, message):
    server = serve(lambda b, i: (status, {}, body))
    engine = engine_for(server)
    tree, leaf = engine.renderer.start([{"role": "user", "content": "x"}])
    with pytest.raises(EngineError, match=message):
        engine.extend([(tree, leaf)], 1, Sampling())
    assert len(server.seen) == 1 and tree.n_nodes == 1


def test_one_refusal_does_not_wait_for_the_pauses_of_others(serve):
    def reply(body, i):
        return (429, {"Retry-After": "30"}, b"") if body["messages"][0]["content"] == "a" else (401, {}, b"no")

    engine = engine_for(serve(reply))
    leaves = [engine.renderer.start([{"role": "user", "content": t}]) for t in "ab"]
    began = time.monotonic()
    with pytest.raises(EngineError, match="HTTP 401"):
        engine.extend(leaves, 1, Sampling())
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 4096 tokens", "code": None},
    ],
)
def test_no_room_in_the_context_is_an_empty_node(serve, error):
    tree, nodes = ask(engine_for(serve(lambda body, i: (400, {}, {"error": error}))), n=2)
    assert [(tree.stop[n], tree.length[n]) for n in nodes] == [(Stop.LENGTH, 0)] * 2


def test_nobody_there(serve):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    engine = OpenAIEngine(f"http://127.0.0.1:{port}/v1", "m", attempts=2, pause=0.001)
    with pytest.raises(EngineError, match="every request failed; the last one: the connection failed: .*refused"):
        ask(engine)


# -- what cannot be done ---------------------------------------------------------------------------------------------


def test_it_cannot_be_trained_on(serve):
    engine = engine_for(serve(lambda body, i: ok("x")))
    tree, (node,) = ask(engine)
    assert engine.trainable is False
    with pytest.raises(EngineError, match="gives no log-probs of given tokens, so nothing can be scored or trained on"):
        engine.score([(tree, node)])
    with pytest.raises(EngineError, match="weights of a served model cannot be replaced"):
        engine.load_weights({})


def test_requests_that_the_protocol_lacks(serve):
    server = serve(lambda body, i: ok("x"))
    engine = engine_for(server)
    for sampling in (Sampling(top_k=3), Sampling(ignore_eos=True)):
        with pytest.raises(EngineError, match="not in the chat/completions protocol"):
            ask(engine, sampling=sampling)
    with pytest.raises(EngineError, match="n=0"):
        ask(engine, n=0)
    tree, (node,) = ask(engine)
    with pytest.raises(EngineError, match=r"leaf 0 \(task 't'\): its path ends in an assistant turn"):
        engine.extend([(tree, node)], 1, Sampling())
    with pytest.raises(EngineError, match="its path is empty"):
        engine.extend([(TokenTree(), 0)], 1, Sampling())
    assert len(server.seen) == 1


def test_a_key_that_is_no_key(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sé\ncret")
    server = serve(lambda body, i: ok("x"))
    with pytest.raises(EngineError, match="OPENAI_API_KEY holds characters that no HTTP header can carry"):
        ask(engine_for(server))
    assert server.seen == []


def test_bad_arguments():
    with pytest.raises(ConfigError) as caught:
        OpenAIEngine("localhost:8000", "", timeout=0, attempts=0, pause=math.nan)
    message = str(caught.value)
    for part in ("base_url='localhost:8000'", "model=''", "timeout=0", "attempts=0, parallel=8", "pause=nan"):
        assert part in message


def test_retry_after():
    assert _retry_after(None) is None and _retry_after("soon") is None
    assert _retry_after("7") == 7 and _retry_after("-1") == 0
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
