"""The system call filter, evaluated as the kernel does it."""

from __future__ import annotations

import errno
import struct

import pytest

from atoll.drivers.shared import seccomp

ALLOW, KILL = 0x7FFF_0000, 0x8000_0000
NEW_USER, NEW_NET, NEW_NS = 0x1000_0000, 0x4000_0000, 0x2_0000
THREAD = 0x3D0F00  # What a C library clones a thread with.
MACHINES = ("x86_64", "aarch64")


def run(program: bytes, number: int, arguments: tuple[int, ...] = (), audit: int = 0) -> int:
    """Classic BPF over the kernel's `seccomp_data`; the return value of the filter."""
    filled = [value & 0xFFFF_FFFF_FFFF_FFFF for value in (*arguments, *[0] * 6)][:6]
    data = struct.pack("=iIQ6Q", number, audit, 0, *filled)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, position = 0, 0
    for _ in range(len(code)):
        kind, then, otherwise, value = code[position]
        position += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif kind == 0x06:
            return int(value)
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[kind]
            position += then if holds else otherwise
    raise AssertionError("the filter does not come to an end")


def judge(machine: str, number: int, *arguments: int) -> str:
    arch = seccomp.ARCHITECTURES[machine]
    program = seccomp.program(machine)
    assert program is not None
    value = run(program, number, arguments, arch.audit)
    if value == ALLOW:
        return "allow"
    return "kill" if value == KILL else errno.errorcode[value & 0xFFFF]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_jump_stays_in_the_program(machine: str) -> None:
    program = seccomp.program(machine)
    assert program is not None
    assert len(program) % 8 == 0
    count = len(program) // 8
    assert count <= 4096
    for index in range(count):
        kind, then, otherwise, _ = struct.unpack_from("=HBBI", program, index * 8)
        if kind not in (0x20, 0x06):
            assert index + 1 + max(then, otherwise) < count
    assert struct.unpack_from("=HBBI", program, (count - 1) * 8)[0] == 0x06


@pytest.mark.parametrize("machine", MACHINES)
def test_denied_calls_are_refused(machine: str) -> None:
    for name, number in seccomp.ARCHITECTURES[machine].denied.items():
        assert judge(machine, number) == "EPERM", name


@pytest.mark.parametrize("machine", MACHINES)
def test_all_other_known_calls_are_allowed(machine: str) -> None:
    arch = seccomp.ARCHITECTURES[machine]
    special = {
        arch.clone3, arch.io_setup, arch.socket, arch.socketpair, arch.ioprio_set,
        *arch.denied.values(),
    }  # fmt: skip
    for number in range(arch.newest + 1):
        if number not in special:
            assert judge(machine, number) == "allow", number


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("beyond", [1, 2, 100, 0x4000_0000, 0x4000_0027, 0x7FFF_FFFF - 500])
def test_newer_calls_are_reported_as_missing(machine: str, beyond: int) -> None:
    newest = seccomp.ARCHITECTURES[machine].newest
    assert judge(machine, newest + beyond) == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("audit", [0, 0x4000_0003, 0xC000_00F3, 0x4000_0028])
def test_calls_of_another_architecture_kill(machine: str, audit: int) -> None:
    program = seccomp.program(machine)
    assert program is not None
    assert run(program, 1, (), audit) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        (17, "allow"), (THREAD, "allow"), (NEW_USER, "EPERM"), (NEW_USER | 17, "EPERM"),
        (NEW_NET | 17, "EPERM"), (NEW_NS, "EPERM"), (THREAD | 0x80, "EPERM"),
        (0x0200_0000, "EPERM"), (0x0400_0000, "EPERM"), (0x0800_0000, "EPERM"),
        (0x2000_0000, "EPERM"), (THREAD & ~0x400, "EPERM"),
        ((1 << 32) | 17, "allow"), ((1 << 40) | NEW_USER, "EPERM"),
    ],
)  # fmt: skip
def test_clone_makes_processes_and_threads_but_no_namespaces(
    machine: str, flags: int, verdict: str
) -> None:
    arch = seccomp.ARCHITECTURES[machine]
    assert judge(machine, arch.clone, flags) == verdict
    assert judge(machine, arch.clone3, flags) == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
def test_only_four_families_of_sockets_can_be_made(machine: str) -> None:
    arch = seccomp.ARCHITECTURES[machine]
    for family in range(64):
        verdict = "allow" if family in (1, 2, 10, 16) else "EPERM"
        assert judge(machine, arch.socket, family, 1) == verdict, family
        assert judge(machine, arch.socketpair, family, 1) == verdict, family
    # The kernel looks at 32 bits of it, so the filter may too.
    assert judge(machine, arch.socket, (1 << 32) | 40, 1) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("family", "allowed"), [(2, {0, 1, 6, 17, 58}), (10, {0, 1, 6, 17, 58}), (16, {0, 4})]
)
def test_only_protocols_whose_buffers_are_counted_can_be_used(
    machine: str, family: int, allowed: set[int]
) -> None:
    arch = seccomp.ARCHITECTURES[machine]
    for protocol in (*range(256), 256, 262, 1 << 31):
        verdict = "allow" if protocol in allowed else "EPROTONOSUPPORT"
        assert judge(machine, arch.socket, family, 1, protocol) == verdict, protocol


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("ioctl", (0, 0x5412), "EPERM"), ("ioctl", (0, 0x541C), "EPERM"),
        ("ioctl", (0, 0x5401), "allow"), ("ioctl", (0, (1 << 32) | 0x5412), "EPERM"),
        ("prctl", (36, 0), "EPERM"), ("prctl", (36, 1), "allow"), ("prctl", (36, 2), "EPERM"),
        ("prctl", (15, 0), "allow"), ("prctl", (36, 1 << 32), "EPERM"),
        ("personality", (0,), "allow"), ("personality", (0xFFFF_FFFF,), "allow"),
        ("personality", (0x0040_0000,), "EPERM"), ("personality", (8,), "EPERM"),
        ("io_setup", (1,), "ENOSYS"),
    ],
)  # fmt: skip
def test_verdicts_depend_on_arguments(
    machine: str, call: str, arguments: tuple[int, ...], verdict: str
) -> None:
    number = getattr(seccomp.ARCHITECTURES[machine], call)
    assert judge(machine, number, *arguments) == verdict


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("prlimit64", (0, 7, 0x7FFF_0000_0000), "allow"), ("prlimit64", (1, 7, 0, 8), "allow"),
        ("prlimit64", (1, 7, 0x7FFF_0000_0000), "EPERM"), ("prlimit64", (1, 7, 8), "EPERM"),
        ("prlimit64", (9, 7, 8), "EPERM"), ("prlimit64", ((1 << 32) | 1, 7, 8), "EPERM"),
        ("setpriority", (0, 0, 5), "allow"), ("setpriority", (0, 9, 5), "allow"),
        ("setpriority", (0, 1, 5), "EPERM"), ("setpriority", (1, 0, 5), "allow"),
        ("setpriority", (1, 1, 5), "EPERM"), ("setpriority", (1, 9, 5), "EPERM"),
        ("setpriority", (2, 0, 5), "EPERM"), ("setpriority", (2, 1000, 5), "EPERM"),
        ("ioprio_set", (1, 0, 0), "allow"), ("ioprio_set", (1, 9, 0), "allow"),
        ("ioprio_set", (1, 1, 0), "EPERM"), ("ioprio_set", (2, 0, 0), "allow"),
        ("ioprio_set", (2, 1, 0), "EPERM"), ("ioprio_set", (3, 0, 0), "EPERM"),
        ("pidfd_send_signal", (3, 15, 0), "allow"), ("pidfd_send_signal", (3, 15, 8), "EPERM"),
        ("pidfd_send_signal", (3, 15, 1 << 32), "EPERM"),
        ("fcntl", (3, 10, 9), "EPERM"), ("fcntl", (3, (1 << 32) | 10, 9), "EPERM"),
        ("fcntl", (3, 8, 1), "allow"), ("fcntl", (3, 1, 0), "allow"),
    ],
)  # fmt: skip
def test_limits_and_priority_of_the_executor_cannot_be_changed(
    machine: str, call: str, arguments: tuple[int, ...], verdict: str
) -> None:
    number = getattr(seccomp.ARCHITECTURES[machine], call)
    assert judge(machine, number, *arguments) == verdict


@pytest.mark.parametrize("machine", MACHINES)
def test_scheduling_and_signals_can_be_set_only_for_the_calling_process(
    machine: str,
) -> None:
    for name, number in seccomp.ARCHITECTURES[machine].on_process.items():
        assert judge(machine, number, 1) == "EPERM", name
        assert judge(machine, number, (1 << 32) | 1) == "EPERM", name
        for pid in (0, 2, 10, 101, -1, -2):
            assert judge(machine, number, pid) == "allow", (name, pid)


def test_a_processor_without_a_table_has_no_filter() -> None:
    assert seccomp.program("riscv64") is None
