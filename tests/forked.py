"""Forks the programs that tests start from a process that has already imported torch and transformers.

A program that a test starts spends most of its time importing: 2 of 2.3 seconds for a refused flag. So tests replace
`subprocess.Popen`: `python FILE`, `python -m MODULE`, `python -c TEXT` and `torchrun` ask a server for a fork. The fork
has the arguments, environment, working directory and standard streams of the request, and runs the program as
`__main__`. Like any other program, it has its own process id, signals and exit status. Programs that it starts, such as
the processes of torchrun, are forked too. The server imports third-party packages only; each program imports `common`
and all other code of this project.

A forked program differs in its parent process (the server), its command line in /proc, and its hash seed. Tests that
depend on these use the fixture `cold`. Some programs are started as usual: programs with options of Python or with a
different value of a variable that a package reads during its import; and all programs with `pytest --cold` or without
`os.pidfd_open`.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

ADDRESS = "FORK_SERVER"  # environment variable: the server's socket
IMPORTED = (
    *("accelerate", "httpx2", "jinja2", "matplotlib.pyplot", "psutil", "rich.console", "rich.table", "torch"),
    *("torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.tensor", "torch.utils.tensorboard"),
    *("tqdm", "transformers", "transformers.generation", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama", "tyro"),
)
# Beginnings of names of variables that Python, the dynamic linker or a package reads only once
READ_ONCE = ("CUDA_", "HF_", "LANG", "LC_", "LD_", "MKL_", "MPL", "OMP_", "PYTHON", "TOKENIZERS_")
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_possible() -> bool:
    return hasattr(os, "pidfd_open") and hasattr(socket, "AF_UNIX")


# In the process that starts programs


def words_of(command: object) -> list[str] | None:
    """The words after `python` in a command that can be forked, else None."""
    if not isinstance(command, list | tuple) or not command:
        return None
    program, *words = map(os.fsdecode, command)
    if Path(program).name == "torchrun":
        return ["-m", "torch.distributed.run", *words]
    if program != sys.executable:
        return None
    has_program = words[1:2] if words[:1] == ["-u"] else words[:1]  # -u: torchrun starts its processes like this
    return words if has_program and (has_program[0] in ("-c", "-m") or not has_program[0].startswith("-")) else None


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(READ_ONCE) and name != "PYTHONPATH")
    return {name: environment[name] for name in names}


class Popen(subprocess.Popen):
    """Starts forkable programs through the server, and all others like `subprocess.Popen`."""

    address: str  # of the server
    inherited: dict[str, str]  # the part of its environment that the server has read
    _server: socket.socket | None = None  # the connection that will deliver the exit status

    def _execute_child(self, *arguments) -> None:
        start = super()._execute_child
        given = inspect.signature(start).bind(*arguments).arguments
        words, environment = words_of(given["args"]), os.environ if given["env"] is None else given["env"]
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        is_special = given["preexec_fn"] or given["pass_fds"] or given["shell"] or given["process_group"] != -1
        if words is None or is_special or read_once(environment) != self.inherited:
            return start(*arguments)
        request = {"words": words, "environment": environment, "directory": os.path.abspath(given["cwd"] or ".")}
        request["is_session"] = given["start_new_session"]
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(self.address)
        content = json.dumps(request).encode()
        socket.send_fds(self._server, [struct.pack("<I", len(content))], streams)
        self._server.sendall(content)
        self.pid = struct.unpack("<i", self._server.recv(4, socket.MSG_WAITALL))[0]
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))
        return None

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        status = self._server.recv(4, socket.MSG_WAITALL)
        self._server.close()
        return self.pid, struct.unpack("<i", status)[0]

    def _internal_poll(self, **arguments) -> int | None:
        if self._server is None:
            return super()._internal_poll(**arguments)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def start_server() -> Callable[[], None]:
    """Start the server, which imports on the first request. Returns a function that ends it."""
    os.environ[ADDRESS] = str(Path(tempfile.mkdtemp()) / "socket")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, os.environ[ADDRESS]]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    server.stdout.readline()  # it listens

    def end() -> None:
        server.communicate()  # closes its standard input
        shutil.rmtree(Path(os.environ.pop(ADDRESS)).parent)

    return end


def use_server() -> None:
    """Start the programs of this process through the server whose address is in its environment."""
    Popen.address, Popen.inherited = os.environ[ADDRESS], read_once(os.environ)
    subprocess.Popen = Popen


# In the server


def serve(listener: socket.socket) -> dict | None:
    """Fork for every request. Returns in each fork, with its request, and returns None when standard input ends."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)  # signals are meant for the programs and for their parent
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:  # a program has ended
                pid, connection = key.data
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(OSError):  # nobody is waiting for it any more
                    connection.sendall(struct.pack("<i", status))
                connection.close()
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request = receive(connection)
                import_packages()
                if not (pid := os.fork()):
                    return request | {"connection": connection}
                for stream in request["streams"]:
                    os.close(stream)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                return None


def receive(connection: socket.socket) -> dict:
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    content = connection.recv(struct.unpack("<I", size)[0], socket.MSG_WAITALL)
    return json.loads(content) | {"streams": streams}


def import_packages() -> None:
    if "torch" not in sys.modules:
        for name in IMPORTED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # garbage collection in a fork then copies no pages


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    Popen.address = address
    return listener


def run(request: dict) -> None:
    """Become the program of a request, and end without freeing all the imports, which would take a quarter second."""
    try:
        become(request)
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    except KeyboardInterrupt:  # Python ends by the signal, unless a function at the exit, of a package, has run `exec`
        sys.excepthook(*sys.exc_info())
        status = None
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


def become(request: dict) -> None:
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    if request["is_session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
    request["connection"].sendall(struct.pack("<i", os.getpid()))  # now it can be signalled
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["is_session"]:
        fork_server()
    words = request["words"]
    is_unbuffered = words[0] == "-u"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, is_quick = getattr(sys, name), number == 2 or is_unbuffered or os.isatty(number)
        mode, buffering = ("w", 1 if is_quick else -1) if number else ("r", -1)
        stream = open(number, mode, buffering, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    first, *rest = words[is_unbuffered:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        sys.path[:1] = [os.getcwd(), *paths]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        sys.path[:1] = ["", *paths]
        sys.argv, code = ["-c", *rest[1:]], compile(rest[0], "<string>", "exec")
    else:
        sys.path[:1] = [os.path.dirname(os.path.realpath(first)), *paths]
        sys.argv, main.__file__ = [first, *rest], first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, vars(main))


def fork_server() -> None:
    """Start another server, which ends with this program: its children must be in the session of the program."""
    listener = listen(f"{Popen.address}-{os.getpid()}")
    theirs, ours = os.pipe()
    if os.fork():
        listener.close()
        os.close(theirs)
        return  # `ours` stays open
    os.close(ours)
    os.dup2(theirs, 0)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    if asked := serve(listener):
        run(asked)
    os._exit(0)


if __name__ == "__main__":
    subprocess.Popen = Popen  # before torch.distributed.run imports it
    Popen.inherited = read_once(os.environ)
    listener = listen(sys.argv[1])
    print("ready", flush=True)
    if asked := serve(listener):
        run(asked)
