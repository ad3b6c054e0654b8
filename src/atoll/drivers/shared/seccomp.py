"""
The system call filter of instances, as a BPF program for bubblewrap.

Calls that agents' programs do not need, or that have been used to escape sandboxes, fail with
EPERM. Calls newer than this table fail with ENOSYS, so that C libraries fall back; so do `clone3`,
whose flags a filter cannot read, and `io_setup`, whose contexts are counted for the whole machine.
All other calls are allowed.

User code has the uid of the executor, and the kernel lets processes of one uid change each other's
limits, priority and scheduling. So these calls are refused for PID 1, the executor. A filter sees
numbers only, and cannot tell a thread of the caller from another process.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass, field

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06

_ALLOW = 0x7FFF_0000
_KILL = 0x8000_0000
_ERRNO = 0x0005_0000

_NUMBER, _ARCH = 0, 4


def _argument(index: int) -> int:
    return 16 + 8 * index


_NAMESPACES = 0x7E02_0080  # CLONE_NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET NEWTIME
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x1_0000
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_PR_SET_CHILD_SUBREAPER = 36
_PRIO_PROCESS, _PRIO_PGRP = 0, 1
_F_SETSIG = 10
_IOPRIO_WHO_PROCESS, _IOPRIO_WHO_PGRP = 1, 2
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_FAMILIES = (_UNIX, _INET, _INET6, _NETLINK)
_INTERNET = (0, 1, 6, 17, 58)  # the default, ICMP, TCP, UDP, ICMPv6
_NETLINKS = (0, 4)  # NETLINK_ROUTE, NETLINK_SOCK_DIAG


@dataclass(frozen=True)
class Architecture:
    audit: int
    newest: int
    clone: int
    clone3: int
    socket: int
    socketpair: int
    ioctl: int
    prctl: int
    personality: int
    io_setup: int
    prlimit64: int
    setpriority: int
    ioprio_set: int
    pidfd_send_signal: int
    fcntl: int
    on_process: dict[str, int] = field(repr=False)
    """Calls whose first argument is a process or thread, refused for PID 1."""
    denied: dict[str, int] = field(repr=False)


# fmt: off
_X86_64 = Architecture(
    audit=0xC000003E, newest=462, clone=56, clone3=435, socket=41, socketpair=53, ioctl=16,
    prctl=157, personality=135, io_setup=206, prlimit64=302, setpriority=141, ioprio_set=251,
    pidfd_send_signal=424, fcntl=72, on_process=dict(
        sched_setparam=142, sched_setscheduler=144, sched_setaffinity=203, sched_setattr=314,
        kill=62, tkill=200, tgkill=234, rt_sigqueueinfo=129, rt_tgsigqueueinfo=297,
    ), denied=dict(
        ptrace=101, process_vm_readv=310, process_vm_writev=311, kcmp=312, process_madvise=440,
        pidfd_getfd=438, process_mrelease=448, mount=165, umount2=166, pivot_root=155, chroot=161,
        open_tree=428, move_mount=429, fsopen=430, fsconfig=431, fsmount=432, fspick=433,
        mount_setattr=442, statmount=457, listmount=458, unshare=272, setns=308, keyctl=250,
        add_key=248, request_key=249, bpf=321, perf_event_open=298, userfaultfd=323,
        io_uring_setup=425, io_uring_enter=426, io_uring_register=427, init_module=175,
        finit_module=313, delete_module=176, create_module=174, kexec_load=246, kexec_file_load=320,
        reboot=169, swapon=167, swapoff=168, acct=163, syslog=103, settimeofday=164,
        clock_settime=227, adjtimex=159, clock_adjtime=305, iopl=172, ioperm=173, modify_ldt=154,
        vhangup=153, quotactl=179, quotactl_fd=443, sysfs=139, _sysctl=156, uselib=134, ustat=136,
        nfsservctl=180, lookup_dcookie=212, name_to_handle_at=303, open_by_handle_at=304,
        fanotify_init=300, fanotify_mark=301, move_pages=279, migrate_pages=256, mbind=237,
        set_mempolicy=238, set_mempolicy_home_node=450, sethostname=170, setdomainname=171,
        memfd_secret=447, vmsplice=278,
    ),
)
_AARCH64 = Architecture(
    audit=0xC00000B7, newest=462, clone=220, clone3=435, socket=198, socketpair=199, ioctl=29,
    prctl=167, personality=92, io_setup=0, prlimit64=261, setpriority=140, ioprio_set=30,
    pidfd_send_signal=424, fcntl=25, on_process=dict(
        sched_setparam=118, sched_setscheduler=119, sched_setaffinity=122, sched_setattr=274,
        kill=129, tkill=130, tgkill=131, rt_sigqueueinfo=138, rt_tgsigqueueinfo=240,
    ), denied=dict(
        ptrace=117, process_vm_readv=270, process_vm_writev=271, kcmp=272, process_madvise=440,
        pidfd_getfd=438, process_mrelease=448, mount=40, umount2=39, pivot_root=41, chroot=51,
        open_tree=428, move_mount=429, fsopen=430, fsconfig=431, fsmount=432, fspick=433,
        mount_setattr=442, statmount=457, listmount=458, unshare=97, setns=268, keyctl=219,
        add_key=217, request_key=218, bpf=280, perf_event_open=241, userfaultfd=282,
        io_uring_setup=425, io_uring_enter=426, io_uring_register=427, init_module=105,
        finit_module=273, delete_module=106, kexec_load=104, kexec_file_load=294, reboot=142,
        swapon=224, swapoff=225, acct=89, syslog=116, settimeofday=170, clock_settime=112,
        adjtimex=171, clock_adjtime=266, vhangup=58, quotactl=60, quotactl_fd=443, nfsservctl=42,
        lookup_dcookie=18, name_to_handle_at=264, open_by_handle_at=265, fanotify_init=262,
        fanotify_mark=263, move_pages=239, migrate_pages=238, mbind=235, set_mempolicy=237,
        set_mempolicy_home_node=450, sethostname=161, setdomainname=162, memfd_secret=447,
        vmsplice=75,
    ),
)
# fmt: on

ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | number)


def program(machine: str | None = None) -> bytes | None:
    """The filter for an architecture; None if there is no table for it."""
    arch = ARCHITECTURES.get(machine or platform.machine())
    if arch is None:
        return None
    allow, eperm = _instruction(_RETURN, _ALLOW), _refuse(errno.EPERM)
    enosys = _refuse(errno.ENOSYS)
    code = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, arch.audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        # Calls newer than this table, and on x86-64 the x32 calls, which have larger numbers.
        _instruction(_AT_LEAST, arch.newest + 1, 0, 1),
        enosys,
        _instruction(_EQUAL, arch.clone3, 1, 0),
        _instruction(_EQUAL, arch.io_setup, 0, 1),
        enosys,
    ]
    for number in sorted(set(arch.denied.values())):
        if number <= arch.newest:
            code += [_instruction(_EQUAL, number, 0, 1), eperm]
    code += _when(arch.clone, [
        _instruction(_LOAD, _argument(0)), _instruction(_ANY_BIT, _NAMESPACES, 0, 1), eperm,
        # Files that a thread with its own descriptor table holds would not be counted.
        _instruction(_ANY_BIT, _CLONE_THREAD, 0, 2), _instruction(_ANY_BIT, _CLONE_FILES, 1, 0),
        eperm, allow,
    ])  # fmt: skip
    code += _when(arch.socketpair, [
        _instruction(_LOAD, _argument(0)), *_among(_FAMILIES), eperm, allow,
    ])  # fmt: skip
    # Buffers of other protocols, such as Multipath TCP, are neither limited nor counted. The error
    # is that of a kernel without them, so that programs fall back.
    unknown = _refuse(errno.EPROTONOSUPPORT)
    netlink = [_instruction(_LOAD, _argument(2)), *_among(_NETLINKS), unknown, allow]
    internet = [_instruction(_LOAD, _argument(2)), *_among(_INTERNET), unknown, allow]
    code += _when(arch.socket, [
        _instruction(_LOAD, _argument(0)),
        *_when(_NETLINK, netlink), *_when(_INET, internet), *_when(_INET6, internet),
        _instruction(_EQUAL, _UNIX, 1, 0), eperm, allow,
    ])  # fmt: skip
    code += _when(arch.ioctl, [
        _instruction(_LOAD, _argument(1)), _instruction(_EQUAL, _TIOCSTI, 2, 0),
        # Line disciplines: kernel modules that are loaded on demand.
        _instruction(_EQUAL, _TIOCSETD, 1, 0),
        _instruction(_EQUAL, _TIOCLINUX, 0, 1), eperm, allow,
    ])  # fmt: skip
    # The leader of an execution must stay a subreaper, to keep track of its processes.
    code += _when(arch.prctl, [
        _instruction(_LOAD, _argument(0)), _instruction(_EQUAL, _PR_SET_CHILD_SUBREAPER, 0, 3),
        _instruction(_LOAD, _argument(1)), _instruction(_EQUAL, 1, 1, 0), eperm, allow,
    ])  # fmt: skip
    code += _when(arch.personality, [
        _instruction(_LOAD, _argument(0)), _instruction(_EQUAL, 0, 2, 0),
        _instruction(_EQUAL, 0xFFFF_FFFF, 1, 0), eperm, allow,
    ])  # fmt: skip
    code += _protect_executor(arch)
    return b"".join([*code, allow])


def _among(values: tuple[int, ...]) -> list[bytes]:
    """Skip the next instruction if the loaded value is one of these."""
    return [_instruction(_EQUAL, value, len(values) - n, 0) for n, value in enumerate(values)]


def _protect_executor(arch: Architecture) -> list[bytes]:
    """
    Refuse changes of PID 1's limits, priority and scheduling, and forged signals. Linux does not
    deliver most signals to the first process of a namespace; gVisor does.
    """
    allow, eperm = _instruction(_RETURN, _ALLOW), _refuse(errno.EPERM)
    # Any thread id denotes its process, so only pid 0, the caller, may be changed.
    code = _when(arch.prlimit64, [
        _instruction(_LOAD, _argument(0)), _instruction(_EQUAL, 0, 5, 0),
        *_unless_null(2, eperm), allow,
    ])  # fmt: skip
    # Scheduling is per thread, and PID 1 has one thread that matters.
    for number in sorted(arch.on_process.values()):
        code += _when(number, [
            _instruction(_LOAD, _argument(0)), _instruction(_EQUAL, 1, 0, 1), eperm, allow,
        ])  # fmt: skip
    for number, process, group in (
        (arch.setpriority, _PRIO_PROCESS, _PRIO_PGRP),
        (arch.ioprio_set, _IOPRIO_WHO_PROCESS, _IOPRIO_WHO_PGRP),
    ):
        # Allowed: processes and threads but PID 1, and the caller's process group; no user.
        code += _when(number, [
            _instruction(_LOAD, _argument(0)),
            _instruction(_EQUAL, process, 0, 2),
            _instruction(_LOAD, _argument(1)), _instruction(_EQUAL, 1, 3, 4),
            _instruction(_EQUAL, group, 0, 2),
            _instruction(_LOAD, _argument(1)), _instruction(_EQUAL, 0, 1, 0),
            eperm, allow,
        ])  # fmt: skip
    # It takes a descriptor, not a pid: forged sender information is refused for every process.
    code += _when(arch.pidfd_send_signal, [*_unless_null(2, eperm), allow])
    # F_SETOWN lets a descriptor signal another process with SIGIO, which PID 1 blocks. F_SETSIG
    # could choose a signal that cannot be blocked.
    code += _when(arch.fcntl, [
        _instruction(_LOAD, _argument(1)), _instruction(_EQUAL, _F_SETSIG, 0, 1), eperm, allow,
    ])  # fmt: skip
    return code


def _unless_null(index: int, refuse: bytes) -> list[bytes]:
    """Five instructions: `refuse` if a pointer is not null, else what follows them."""
    return [
        _instruction(_LOAD, _argument(index)), _instruction(_EQUAL, 0, 0, 2),
        _instruction(_LOAD, _argument(index) + 4), _instruction(_EQUAL, 0, 1, 0), refuse,
    ]  # fmt: skip


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """
    Execute `body`, which returns on every path, if the loaded value is `number`.
    """
    return [_instruction(_EQUAL, number, 0, len(body)), *body]


def programs() -> dict[str, str]:
    """The filters in hexadecimal, by the name of the machine."""
    found = {machine: program(machine) for machine in ARCHITECTURES}
    return {machine: code.hex() for machine, code in found.items() if code is not None}
