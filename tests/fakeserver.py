"""A chat/completions server on this machine, for tests of judges and teachers."""

import contextlib
import http.server
import json
import threading


def completion(*texts, reason="stop", logprobs=None):
    """The body of an answer; logprobs: per text a list of (token, {alternative: log-prob})."""
    choices = []
    for i, text in enumerate(texts):
        choice = {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = {
                "content": [
                    {
                        "token": token,
                        "logprob": alternatives[token],
                        "top_logprobs": [{"token": t, "logprob": lp} for t, lp in alternatives.items()],
                    }
                    for token, alternatives in logprobs
                ]
            }
        choices.append(choice)
    return {"choices": choices, "usage": {"prompt_tokens": 10, "completion_tokens": 2 * len(texts)}}


class Server:
    """Answers with `reply(body, number of this request)`; keeps what it saw (bodies, authorisations, paths).

    A reply: the content (status 200), (status, content), (status, headers, content), or a function of the handler.
    """

    def __init__(self, reply):
        self.seen, self.keys, self.paths = [], [], []
        lock, outer = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.seen)
                    outer.seen.append(body)
                    outer.keys.append(self.headers.get("Authorization"))
                    outer.paths.append(self.path)
                answer = reply(body, number)
                if callable(answer):
                    return answer(self)
                answer = answer if isinstance(answer, tuple) else (200, answer)
                status, headers, content = answer if len(answer) == 3 else (answer[0], {}, answer[1])
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                fixed = {"Content-Type": "application/json", "Content-Length": str(len(data))}
                with contextlib.suppress(OSError):  # the client may have given up
                    self.send_response(status)
                    for name, value in {**fixed, **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@contextlib.contextmanager
def servers(monkeypatch):
    """A function that starts servers; all are closed at the end."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with contextlib.ExitStack() as stack:

        def start(reply):
            server = Server(reply)
            stack.callback(server.close)
            return server

        yield start
