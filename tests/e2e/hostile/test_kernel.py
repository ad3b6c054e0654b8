"""System calls and files that have led out of sandboxes before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import drivers

if TYPE_CHECKING:
    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = [pytest.mark.every_driver, pytest.mark.quick]

PRELUDE = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    print("done" if result >= 0 else errno.errorcode[ctypes.get_errno()])
buffer = ctypes.create_string_buffer(4096)
"""

# By x86-64 number: what must be refused, with arguments that would do something.
CALLS = {
    "mount": 'call(165, b"none", b"/tmp", b"tmpfs", 0, None)',
    "remount": 'call(165, b"none", b"/", None, 32, None)',
    "bind mount": 'call(165, b"/proc", b"/tmp", None, 4096, None)',
    "umount": 'call(166, b"/proc/keys", 2)',
    "pivot_root": 'call(155, b"/tmp", b"/tmp")',
    "chroot": 'call(161, b"/tmp")',
    "open_tree": 'call(428, -100, b"/", 1)',
    "fsopen": 'call(430, b"tmpfs", 0)',
    "move_mount": 'call(429, -100, b"/tmp", -100, b"/workspace", 0)',
    "mount_setattr": 'call(442, -100, b"/", 0, buffer, 32)',
    "unshare user": "call(272, 0x10000000)",
    "unshare mount": "call(272, 0x20000)",
    "unshare net": "call(272, 0x40000000)",
    "unshare pid": "call(272, 0x20000000)",
    "clone user": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone mount": "call(56, 0x20000 | 17, 0, 0, 0, 0)",
    "clone3": "buffer[3:4] = b'\\x10'\ncall(435, buffer, 88)",
    "setns": 'call(308, os.open("/proc/self/ns/mnt", 0), 0)',
    "ptrace": "call(101, 16, os.getppid(), 0, 0)",
    "process_vm_readv": "call(310, os.getppid(), buffer, 1, buffer, 1, 0)",
    "process_vm_writev": "call(311, os.getppid(), buffer, 1, buffer, 1, 0)",
    "pidfd_getfd": "call(438, os.pidfd_open(os.getppid()), 0, 0)",
    "kcmp": "call(312, 1, os.getpid(), 0, 0, 0)",
    "keyctl": "call(250, 0, -3, 1)",
    "add_key": 'call(248, b"user", b"x", b"y", 1, -3)',
    "request_key": 'call(249, b"user", b"x", None, -3)',
    "bpf": "call(321, 0, buffer, 72)",
    "perf_event_open": "call(298, buffer, 0, -1, -1, 0)",
    "userfaultfd": "call(323, 1)",
    "io_uring_setup": "call(425, 8, buffer)",
    "io_setup": "call(206, 1000, buffer)",
    "io_uring_enter": "call(426, 0, 0, 0, 0, 0, 0)",
    "init_module": 'call(175, buffer, 10, b"")',
    "finit_module": 'call(313, 0, b"", 0)',
    "delete_module": 'call(176, b"loop", 0)',
    "kexec_load": "call(246, 0, 0, 0, 0)",
    "kexec_file_load": 'call(320, 0, 0, 0, b"", 0)',
    "reboot": "call(169, 0xfee1dead, 672274793, 0, 0)",
    "swapon": 'call(167, b"/workspace/swap", 0)',
    "acct": 'call(163, b"/workspace/acct")',
    "syslog": "call(103, 3, buffer, 100)",
    "settimeofday": "call(164, buffer, 0)",
    "clock_settime": "call(227, 0, buffer)",
    "adjtimex": "call(159, buffer)",
    "iopl": "call(172, 3)",
    "ioperm": "call(173, 0, 1, 1)",
    "modify_ldt": "call(154, 0, buffer, 16)",
    "sethostname": 'call(170, b"evil", 4)',
    "setdomainname": 'call(171, b"evil", 4)',
    "quotactl": 'call(179, 0, b"/dev/vda", 0, buffer)',
    "name_to_handle_at": 'call(303, -100, b"/workspace", buffer, buffer, 0)',
    "open_by_handle_at": "call(304, -100, buffer, 0)",
    "fanotify_init": "call(300, 0, 0)",
    "move_pages": "call(279, 0, 0, 0, 0, 0, 0)",
    "personality": "call(135, 0x0400000)",
    "memfd_secret": "call(447, 0)",
    "lookup_dcookie": "call(212, 0, buffer, 100)",
    "vhangup": "call(153)",
    "giving up being a subreaper": "call(157, 36, 0, 0, 0, 0)",
    "TIOCSTI": 'm, s = os.openpty()\ncall(16, s, 0x5412, b"x")',
    "TIOCSETD": "m, s = os.openpty()\ncall(16, s, 0x5423, bytes(4))",
    "a call of the future": "call(480, 0, 0, 0)",
    "an x32 call": "call(0x40000000 + 39)",
    "setuid 0": "call(105, 0)",
    "setgroups": "call(116, 0, buffer)",
    "setresuid": "call(117, 0, 0, 0)",
    "capset": "import struct\ncall(126, struct.pack('II', 0x20080522, 0), b'\\xff' * 24)",
    "raise a limit": "call(160, 7, struct.pack('QQ', 1 << 20, 1 << 20))",
    "real time": "call(144, 0, 1, struct.pack('i', 50))",
    "nice": "call(141, 0, 0, -10)",
    "a device node": 'call(133, b"/workspace/disk", 0o060666, 0xfe00)',
    "a character device": 'call(133, b"/tmp/mem", 0o020666, 0x101)',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_a_dangerous_call_is_refused(shared: Box, kind: str) -> None:
    printed = shared.printed(f"import struct\n{PRELUDE}\n{CALLS[kind]}")
    assert printed in ("EPERM", "ENOSYS", "EACCES", "EINVAL", "EPFNOSUPPORT"), printed
    assert printed != "EINVAL" or kind in ("setuid 0", "setresuid")


def test_calls_in_another_processor_mode_kill_the_process(shared: Box) -> None:
    code = """
import ctypes, mmap
# mov eax, 20 (getpid of i386); int 0x80; ret
area = mmap.mmap(-1, 4096, prot=7)
area.write(bytes.fromhex("b814000000cd80c3"))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))()
print("passed")
"""
    result = shared.run(code)
    assert (result["status"], result["signal"]) == ("failed", "SIGSYS")
    shared.assert_usable()


def test_processes_have_no_privileges_and_cannot_gain_any(target: Target, shared: Box) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{shared.pid_1}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert set(status["Uid"].split()) != {"0"}
    assert status["Groups"].strip() in ("", status["Uid"].split()[0], "65534")
    inside = shared.printed("cat /proc/self/status", language="shell")
    assert "CapBnd:\t0000000000000000" in inside
    assert "NoNewPrivs:\t1" in inside


def test_setuid_files_give_no_privileges(target: Target, shared: Box) -> None:
    code = """
id -u
cp /bin/sh ./root-shell && chmod 6777 ./root-shell
./root-shell -p -c 'id -u; id -ru'
for file in $(find /usr/bin /usr/sbin /bin -perm -4000 2>/dev/null); do
    case $file in */su|*/sudo|*/mount|*/umount|*/newgrp) $file --version >/dev/null 2>&1;; esac
done
su -c id 2>/dev/null; sudo -n id 2>/dev/null; mount -t tmpfs none /tmp 2>/dev/null && echo mounted
true
"""
    own, effective, real = shared.printed(code, language="shell").splitlines()
    assert own != "0"
    assert (effective, real) == (own, own)
    # An engine has no option for these; `no_new_privs` has the same effect.
    if target.privileged and drivers.CHOSEN == "local":
        mounts = Path(f"/proc/{shared.pid_1}/mountinfo").read_text().splitlines()
        workspace = next(line for line in mounts if line.split()[4] == "/workspace")
        assert {"nosuid", "nodev"} <= set(workspace.split()[5].split(","))


def test_namespaces_cannot_be_nested_by_programs(shared: Box) -> None:
    code = "for f in U m n p i u C T; do unshare -$f true 2>/dev/null && echo $f; done; true"
    assert shared.printed(code, language="shell") == ""
    assert (
        shared.printed("bwrap --ro-bind / / true 2>/dev/null && echo yes; true", language="shell")
        == ""
    )


def test_limits_of_a_process_cannot_be_raised(shared: Box) -> None:
    code = """
import resource
for kind in ("NOFILE", "FSIZE", "CORE", "MEMLOCK", "NPROC", "DATA"):
    number = getattr(resource, "RLIMIT_" + kind)
    soft, hard = resource.getrlimit(number)
    try:
        if hard != -1:
            resource.setrlimit(number, (hard + 1, hard + 1))
            print("raised", kind)
    except (OSError, ValueError):
        pass
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    assert shared.printed(code) == "(0, 0)"


def test_no_core_file_is_written(fresh: Box) -> None:
    result = fresh.run("import os\nos.abort()")
    assert result["signal"] == "SIGABRT"
    assert result["artifacts"] == []
    assert fresh.client.get(fresh.files).json()["items"] == []


def test_clock_hostname_and_kernel_settings_of_the_host_are_unchanged(
    target: Target, shared: Box
) -> None:
    places = [Path("/proc/sys/kernel") / name for name in ("hostname", "core_pattern", "modprobe")]
    before = [place.read_text() for place in places if place.exists()]
    shared.run(
        "cd /proc/sys/kernel\n"
        "for f in hostname core_pattern modprobe; do echo '|/tmp/evil' > $f; done\n"
        "hostname evil\ndate -s 2001-01-01\necho b > /proc/sysrq-trigger",
        language="shell",
    )
    assert [place.read_text() for place in places if place.exists()] == before


def test_terminals_of_the_host_are_unreachable(shared: Box) -> None:
    code = """
import os
for path in ("/dev/tty", "/dev/console", "/dev/tty0", "/dev/pts/0", "/dev/ptmx"):
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
        print(path)
        os.close(fd)
    except OSError:
        pass
print(os.getsid(0) == os.getpid())
"""
    lines = shared.printed(code).splitlines()
    assert lines[-1] == "True"
    assert set(lines[:-1]) <= {"/dev/ptmx"}
