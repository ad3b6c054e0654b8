"""
The process of one run, from taking its job to its exit.

Everything here runs with the rights of user code and is not trusted: the supervisor relies only on
what the kernel reports about this process. The return value goes through a pipe of its own: one
byte for its kind (a value, or an error), and JSON.

What each run calls is imported by name: looking it up in its module would write to more pages of
memory, and each page that a child writes to is copied first. `python -m bench.profile` counts them.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import resource
import site
import sys
from os import _exit, access, chdir, close, dup2, getcwd, getpid, putenv, unsetenv
from sys import modules

from ...protocol import minijson
from ..runs import terminal
from ..syscalls import set_dumpable, set_oom_score
from . import jobs
from .jobs import receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

VALUE = b"V"
FAILURE = b"E"
SOURCE_NAME = "<code>"
BUNDLE_PREFIX = __name__.partition(".")[0] + "/"
ARGUMENT_LIMIT = 100_000
OUT_OF_MEMORY = 137
"""Exit code of a Python process that ran out of memory, where there is no control group."""
PACKAGES = "ATOLL_PACKAGES"
"""Variable that names the directory of the session's own packages."""

VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
"""The content of `os.environ`."""
ENCODING, ENCODE_ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
Module = type(sys)

REHEARSAL = {"code": "print(end='')\n", "args": [], "env": {"_": ""}, "limits": {}}

_leader = 0

INTERPRETERS = {
    "shell": (["bash", "sh"], ["-c"]),
    "javascript": (["node", "nodejs"], ["-e"]),
}


def rehearse() -> None:
    """
    Do what every run does in advance: code and caches are warm then, and memory pages are copied.
    """
    path, argv, main = list(sys.path), sys.argv, modules["__main__"]
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    jobs.send(ours, 0, REHEARSAL, [ours.fileno()] * 4)
    _, job, descriptors = receive(theirs, announce=True)
    for fd in descriptors:
        close(fd)
    ours.close()
    theirs.close()
    _limit(job["limits"])
    set_variables(environment(job["env"]))
    sys.path[0:0] = search_path(job["env"])
    add_user_site()
    _user_code(job, -1)
    _flush(0)
    unsetenv(b"_")
    del VARIABLES[b"_"]
    sys.path[:], sys.argv, modules["__main__"] = path, argv, main


def wait_and_run(socket: _socket.socket, oom_score: int) -> NoReturn:
    _, job, descriptors = receive(socket, announce=True)
    socket.close()
    stdin, stdout, stderr, value = descriptors
    dup2(stdin, 0)
    dup2(stdout, 1)
    dup2(stderr, 2)
    close(stdin)
    close(stdout)
    close(stderr)
    # Not before: user code of an earlier run could access what this process shares with the zygote.
    set_dumpable(True)
    if oom_score:
        # Before that, the file in /proc belongs to root.
        set_oom_score(oom_score)
    if job.get("terminal"):
        terminal.control(0)
    _exit(_run(job, value))


def _run(job: dict[str, Any], value: int) -> int:
    global _leader
    _leader = getpid()
    try:
        _limit(job["limits"])
        # In addition to the instance's own variables.
        set_variables(environment(job["env"]))
        try:
            chdir(job["cwd"])
        except OSError as error:
            _report(
                value, FAILURE, _failure("bad_cwd", "cwd %s: %s" % (job["cwd"], error.strerror))
            )
            return 1
        if job["kind"] == "python":
            return _python(job, value)
        if job["kind"] == "context":
            from . import context_interpreter

            context_interpreter.serve(job, value)
        return _execute(job, value)
    except MemoryError:
        return OUT_OF_MEMORY


def set_variables(variables: dict[str, str]) -> None:
    """Like `os.environ.update`."""
    for name, text in variables.items():
        key, value = name.encode(ENCODING, ENCODE_ERRORS), text.encode(ENCODING, ENCODE_ERRORS)
        putenv(key, value)
        VARIABLES[key] = value


def environment(given: dict[str, str]) -> dict[str, str]:
    """The run's own variables, with the complete search paths of modules and commands."""
    packages = given.get(PACKAGES)
    if not packages and "PYTHONPATH" not in given:
        return given
    env = dict(given)
    if packages:
        # Before the template's packages, after those of the user.
        env["PYTHONPATH"] = ":".join(search_path(env))
        programs = packages + "/bin"
        path, own = env.get("PATH"), os.environ.get("PATH", os.defpath)
        env["PATH"] = "%s:%s" % ((path, programs) if path else (programs, own))
    if "PYTHONPATH" in env and "PYTHONPATH" in os.environ:
        # Followed by the instance's own path, which has `atoll_session`.
        env["PYTHONPATH"] = "%s:%s" % (env["PYTHONPATH"], os.environ["PYTHONPATH"])
    return env


def search_path(env: dict[str, str]) -> list[str]:
    """The first entries of the module path: PYTHONPATH, then the session's packages."""
    if PACKAGES not in env and "PYTHONPATH" not in env:
        return []
    entries = [entry for entry in env.get("PYTHONPATH", "").split(":") if entry]
    packages = env.get(PACKAGES)
    return entries if not packages or packages in entries else [*entries, packages]


def add_user_site() -> None:
    """
    Add the directory in the home directory into which `pip install` puts packages, because the
    template's own is read-only. Only in processes of user code.
    """
    if sys.prefix != sys.base_prefix or VARIABLES.get(b"PYTHONNOUSERSITE"):
        return  # A virtual environment has no user site.
    site.USER_BASE = site.USER_SITE = None  # Computed from the zygote's variables.
    base = VARIABLES.get(b"PYTHONUSERBASE") or VARIABLES.get(b"HOME", b"") + b"/.local"
    if not access(base + USER_SITE, 0):
        return
    directory = site.getusersitepackages()
    if directory in sys.path or not os.path.isdir(directory):
        return
    for number, entry in enumerate(sys.path):
        if entry.endswith(("/site-packages", "/dist-packages")):
            sys.path.insert(number, directory)
            return
    sys.path.append(directory)


def _user_site() -> bytes:
    """The path of user site directories below their base."""
    site.USER_BASE, site.USER_SITE = "", None
    try:
        return os.fsencode(site.getusersitepackages())
    finally:
        site.USER_BASE = site.USER_SITE = None


USER_SITE = _user_site()


def _limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))


def _failure(code: str, message: str, **more: str) -> bytes:
    return minijson.dumps(dict(more, code=code, message=message))


def _report(fd: int, kind: bytes, body: bytes) -> None:
    """Write to the result pipe; only the run's first process may, not its forks."""
    if os.getpid() != _leader:
        return
    view = memoryview(kind + body)
    while view:
        view = view[os.write(fd, view) :]


# Commands


def _execute(job: dict[str, Any], value: int) -> int:
    """Replace this process by the command; returns only if that fails."""
    # Python changes these signals; programs that it starts expect the defaults.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if job["kind"] == "command":
        candidates, argv, missing = [job["command"][0]], job["command"], "command_not_found"
    else:
        candidates, argv = _interpreter(job)
        missing = "interpreter_missing"
    problem = None
    for program in candidates:
        try:
            os.execvpe(program, [program, *argv[1:]], os.environ)
        except OSError as error:
            problem = problem if isinstance(problem, PermissionError) else error
    assert problem is not None
    if isinstance(problem, (FileNotFoundError, NotADirectoryError)):
        code, status = missing, 127
        message = "%s is not installed in this sandbox" % " or ".join(candidates)
    else:
        code, status = "not_executable", 126
        message = "%s cannot be executed: %s" % (candidates[0], problem.strerror)
    _report(value, FAILURE, _failure(code, message))
    os.write(2, ("atoll: %s\n" % message).encode("utf-8", "replace"))
    return status


def _interpreter(job: dict[str, Any]) -> tuple[list[str], list[str]]:
    candidates, flags = INTERPRETERS[job["kind"]]
    code = job["code"]
    arguments = ["bash", *job["args"]] if job["kind"] == "shell" else ["--", *job["args"]]
    if len(code.encode("utf-8", "surrogatepass")) < ARGUMENT_LIMIT:
        return candidates, ["", *flags, code, *arguments]
    path = "/tmp/%s" % job["id"]  # noqa: S108 - private to the instance
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)
    return candidates, ["", path, *job["args"]]


# Python


def _python(job: dict[str, Any], value: int) -> int:
    sys.path[0:0] = search_path(job["env"])
    add_user_site()
    _reseed()
    try:
        status = _user_code(job, value)
    except SystemExit as exit:
        status = _exit_status(exit)
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is its result
        status = _exception(error, job["code"] or "", value)
        if isinstance(error, MemoryError) and "DATA" in job["limits"]:
            status = OUT_OF_MEMORY
    return _finish(status)


def _user_code(job: dict[str, Any], value: int) -> int:
    source: str | None = job["code"]
    name: str | None = job.get("function")
    sys.argv = ["main.py", *job["args"]]
    sys.path.insert(0, getcwd())
    main = Module("__main__")
    variables = main.__dict__
    variables["__builtins__"] = __builtins__
    modules["__main__"] = main
    if source is not None:
        code = compile(source, SOURCE_NAME, "exec", dont_inherit=True)
        exec(code, variables)  # noqa: S102
        handler = variables.get(name or "handler")
    else:
        module, _, name = (name or "").partition(":")
        handler = None
        try:
            __import__(module)
            handler = getattr(sys.modules[module], name, None)
        except ModuleNotFoundError as error:
            if not (module + ".").startswith("%s." % error.name):
                raise  # The module exists, but one that it imports does not.
            name = "%s:%s" % (module, name)
    if not callable(handler):
        if name is None:
            return 0
        problem = "does not exist" if handler is None else "cannot be called"
        return _fail(value, "function_not_found", "function %s %s" % (name, problem))
    result = handler(_input(job))
    if hasattr(result, "__await__"):
        import asyncio

        async def wait_for() -> Any:
            return await result

        result = asyncio.run(wait_for())
    try:
        text = minijson.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        message = "handler returned %s, which is not JSON: %s" % (type(result).__name__, error)
        return _fail(value, "return_value_not_json", message)
    if len(text) > job["return_limit"]:
        message = "the return value has %d bytes of JSON; %d are allowed" % (
            len(text),
            job["return_limit"],
        )
        return _fail(value, "return_value_too_large", message)
    _report(value, VALUE, text)
    return 0


def _fail(value: int, code: str, message: str) -> int:
    """Report why a function has no return value; returns the exit code."""
    _report(value, FAILURE, _failure(code, message))
    _write_stderr("atoll: %s\n" % message)
    return 1


def _input(job: dict[str, Any]) -> Any:
    if job.get("body") is None:
        return job["event"]
    import binascii

    return binascii.a2b_base64(job["body"])


def _reseed() -> None:
    """
    Give each fork its own seed: otherwise all would draw the same numbers from numpy's generator.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _exit_status(exit: SystemExit) -> int:
    code = exit.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int.__and__(code, 0xFF)
    try:
        text = "%s\n" % (code,)
    except BaseException:  # noqa: BLE001 - __str__ is user code
        return 1
    _write_stderr(text)
    return 1


def _write_stderr(text: str) -> None:
    """Write to stderr, which user code may have replaced."""
    try:
        sys.stderr.write(text)
    except BaseException:  # noqa: BLE001 - it may be user code, or None
        pass


def _exception(error: BaseException, source: str, value: int) -> int:
    # Every step below can run user code: __str__, excepthook, attributes of sys, a metaclass.
    message = lines = ""
    name = type.__dict__["__name__"].__get__(type(error))
    try:
        import linecache
        import traceback

        linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(True), SOURCE_NAME)
        trace = error.__traceback__
        # The outermost frame is this module's; a syntax error has no other.
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(BUNDLE_PREFIX):
            trace = trace.tb_next
        error.__traceback__ = trace
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, trace)
        else:
            lines = "".join(traceback.format_exception(type(error), error, trace))
            _write_stderr(lines)
        # By the type itself: the result may be of a class of user code.
        message = str.__getitem__(str(error), slice(0, 10_000))
    except BaseException:  # noqa: BLE001 - see above
        if not lines:
            _write_stderr("%s\n" % name)
    try:
        _report(
            value,
            FAILURE,
            _failure("exception", message, name=name, traceback=lines[-50_000:]),
        )
    except BaseException:  # noqa: BLE001 - see above
        pass
    return 1


def _finish(status: int) -> int:
    """Do what the interpreter does at exit: join threads, call atexit functions, flush buffers."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit = sys.modules.get("atexit")
        if atexit is not None:
            atexit._run_exitfuncs()
    except SystemExit as exit:
        status = _exit_status(exit)
    except BaseException:  # noqa: BLE001 - as above
        status = status or 1
    return _flush(status)


def _flush(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # noqa: BLE001 - as above
            status = status or 120
    return status
