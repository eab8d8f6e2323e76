"""Runs inside the sandbox: loads a candidate, then its tests, and reports each over a private pipe.

argv: descriptor of the orders (read), descriptor of the results (write). The secret that makes a result count arrives
only after the candidate's code has run, and lives in no module-level name. Stand-alone, standard library only.
"""

import atexit
import json
import os
import sys


def main(orders, results):
    read, write, dumps, loads, leave, flush = os.read, os.write, json.dumps, json.loads, os._exit, sys.stdout.flush
    hooks = atexit._run_exitfuncs  # no public name runs the hooks early
    buffer = b""

    def receive():
        nonlocal buffer
        while b"\n" not in buffer:
            piece = read(orders, 65536)
            if not piece:
                leave(3)
            buffer += piece
        line, _, buffer = buffer.partition(b"\n")
        return loads(line)

    def send(message):
        data = dumps(message).encode() + b"\n"
        while data:
            data = data[write(results, data) :]

    code = receive()["code"]
    space = {"__name__": "__candidate__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "candidate.py", "exec"), space)
    except BaseException as error:
        send({"error": f"{type(error).__name__}: {error}"})
        leave(1)
    send({"loaded": True})
    task = receive()
    secret = task["secret"]
    for index, test in enumerate(task["tests"]):
        try:
            if "run" in test:
                exec(compile(test["run"], f"test_{index + 1}.py", "exec"), space)
                outcome = {"value": None}
            else:
                outcome = {"value": loads(dumps(space[test["call"]](*test["args"], **test["kwargs"])))}
        except BaseException as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:500]}
        send({"secret": secret, "index": index, **outcome})
    hooks()
    flush()
    send({"secret": secret, "done": True})
    leave(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
