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
    """Answers with `reply(body, number of this request)`: a dict (status 200), or (status, dict). Keeps what it saw."""

    def __init__(self, reply):
        self.seen = []
        lock, outer = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.seen)
                    outer.seen.append(body)
                answer = reply(body, number)
                status, content = answer if isinstance(answer, tuple) else (200, answer)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(OSError):  # the client may have given up
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
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
