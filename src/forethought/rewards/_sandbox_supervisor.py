"""Runs one program under limits and leaves none of its descendants behind. Stand-alone: started by `sandbox.py` with
`python -I -S`, standard library only.

Three processes: this supervisor, an init, and the program. Where the kernel permits, init is process 1 of a new pid
namespace (with its own network): when it goes, the kernel kills everything inside, also what called setsid or forked
twice. Otherwise the supervisor is the subreaper of the whole tree and kills descendants until none is left.

File descriptors: 0 control (its end of file means: stop; so the tree also ends with the process that started it),
1 report (one JSON object at the end); the program's own descriptors are named in the configuration, argv[1].
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option, value):
    if LINUX:
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def write_file(path, text):
    with open(path, "w") as f:
        f.write(text)


def isolate(network):
    """New user, pid and (unless `network`) net namespace; False where the kernel or the container forbids it."""
    if not LINUX:
        return False
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | (0 if network else CLONE_NEWNET)
    if _libc.unshare(flags) != 0:
        return False
    try:
        write_file("/proc/self/setgroups", "deny")
        write_file("/proc/self/uid_map", f"{uid} {uid} 1")
        write_file("/proc/self/gid_map", f"{gid} {gid} 1")
    except OSError:
        pass  # unmapped: the program runs as nobody, which is still isolated
    return True


def table():
    """pid -> parent pid of all processes."""
    out = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as f:
                    out[int(name)] = int(f.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass
    return out


def descendants(root):
    parents = table() if LINUX else {}
    found, size = {root}, 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


def memory(pids):
    """Bytes in use by these processes, pages shared between them counted once."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
                total += sum(int(line.split()[1]) * 1024 for line in f if line.startswith(b"Pss:"))
        except (OSError, ValueError):
            pass
    return total


def reap():
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def kill_all(init, isolated):
    """Kill init and every descendant; return when none is left."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for pid in [init, *descendants(os.getpid())]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if not LINUX:
            try:
                os.killpg(init, signal.SIGKILL)
            except OSError:
                pass
        reap()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if isolated or not descendants(os.getpid()):
                return
        time.sleep(0.005)


def program(config):
    """In the program's process: limits, descriptors, exec. Never returns."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        for fd, wanted in enumerate(config["stdio"]):
            os.dup2(wanted, fd, inheritable=True)
        for fd in config["keep"]:
            os.set_inheritable(fd, True)
        kept = [2, *config["keep"], 1024]
        for low, high in zip(kept, kept[1:], strict=False):
            os.closerange(low + 1, high)
        limits = {
            resource.RLIMIT_AS: config["memory"],
            resource.RLIMIT_CPU: int(config["timeout"]) + 2,
            resource.RLIMIT_FSIZE: config["file_size"],
            resource.RLIMIT_CORE: 0,
        }
        for which, value in limits.items():
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        os.chdir(config["cwd"])
        os.execvpe(config["argv"][0], config["argv"], config["env"])
    except BaseException as error:
        os.write(2, f"sandbox: cannot start {config['argv'][0]}: {error}\n".encode())
    os._exit(127)


def init(config, done):
    """First process of the namespace: starts the program, reaps orphans, reports how the program ended."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(done, 0)
    if poll.poll(0):  # the supervisor died before the line above
        os._exit(1)
    os.close(0)
    os.close(1)
    child = os.fork()
    if child == 0:
        program(config)
    for fd in {*config["stdio"], *config["keep"]}:
        os.close(fd)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            os.write(done, json.dumps(status).encode())
            os._exit(0)


def watch(config, started, done):
    """Wait for the end, the limit or the order to stop. Returns (reason, wait status of the program or None)."""
    poll = select.poll()
    poll.register(done, select.POLLIN)
    poll.register(0, select.POLLIN)
    end = started + config["timeout"]
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return "timeout", None
        ready = dict(poll.poll(min(left, 0.1) * 1000 + 1))
        if done in ready:
            status = os.read(done, 64)
            return ("end", json.loads(status)) if status else ("died", None)
        if 0 in ready:
            return "stopped", None
        if memory(descendants(os.getpid())) > config["memory"]:
            return "memory", None


def main():
    config = json.loads(sys.argv[1])
    isolated = config["namespaces"] and isolate(config["network"])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done, done_write = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(done)
        init(config, done_write)
    os.close(done_write)
    for fd in {*config["stdio"], *config["keep"]}:
        os.close(fd)
    reason, status = watch(config, started, done)
    seconds = time.monotonic() - started
    kill_all(child, isolated)
    report = {"reason": reason, "status": status, "seconds": seconds, "isolated": isolated}
    os.write(1, json.dumps(report).encode())


if __name__ == "__main__":
    main()
