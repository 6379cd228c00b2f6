"""Rights that a guest of the `process` engine gives up before its first process starts. Standard library only.

They hold for all its processes and cannot be regained: no new privileges, a session keyring of its own, a filter of system calls
(seccomp(2)), and a Landlock domain (landlock(7)) that ends abstract sockets and signals at the guest. Where no mount namespace
can hide files, the domain hides them too; it cannot keep a guest from connecting to a socket whose path it knows.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS = 2, 0x7FFF0000, 0x50000, 0x80000000
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF (linux/bpf_common.h)
NUMBER_AT, ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
EPERM, ENOSYS = 1, 38
X32 = 0x40000000  # numbers of the x32 ABI of x86-64
KEYCTL_JOIN_SESSION_KEYRING = 1

# System calls that Docker's default profile denies, too, and that need no privilege: keyrings are shared by all processes of a
# user, the others are a large part of the kernel's exploits. By machine: the architecture for seccomp (linux/audit.h), keyctl,
# then add_key, request_key, bpf, perf_event_open, userfaultfd. io_uring_setup, _enter and _register are the same everywhere.
MACHINES = {
    "x86_64": (0xC000003E, 250, (248, 249, 321, 298, 323)),
    "aarch64": (0xC00000B7, 219, (217, 218, 280, 241, 282)),
}
IO_URING = (425, 426, 427)
# clone3(2) can start a process in another control group (CLONE_INTO_CGROUP), also where their mount is read-only. Its flags lie
# in memory, which a filter cannot read. Programs that hear ENOSYS use clone(2), so Docker's default profile answers that, too.
CLONE3 = 435

# Capabilities that a guest of root keeps: Docker's default without raw sockets and device files (capability.h).
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID = 0, 1, 3, 4, 5, 6, 7
CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT = 10, 18
KEPT_CAPABILITIES = {
    *(CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID),
    *(CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT),
}

# landlock(7); the numbers of its system calls are the same everywhere.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
FILES_FROM, SCOPES_FROM = 2, 6  # versions: Linux 5.19 (files may be moved between directories), Linux 6.12
SCOPES = 0b11  # abstract sockets, signals
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
FILE_ACCESS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ_ACCESS = EXECUTE | READ_FILE | READ_DIR
ACCESS_BITS = {2: 14, 3: 15, 5: 16}  # access rights of a version: all those of the bits below

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 without Landlock."""
    return max(0, _syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION))


def has_filter() -> bool:
    """Return whether the filter of system calls is known for this machine."""
    return os.uname().machine in MACHINES


def confine(hidden: Collection[str], kept: dict[str, bool]) -> None:
    """Confine this process and all that it starts. OSError if the kernel refuses: then nothing may run.

    `hidden` paths are hidden by Landlock, if it can; of the `kept` ones within them, those that are true stay writable.
    """
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    version = landlock_version()
    places = dict(visible(hidden, kept)) if hidden and version >= FILES_FROM else {}
    if places or version >= SCOPES_FROM:
        _enter_domain(version, places)
    if has_filter():
        architecture, keyctl, denied = MACHINES[os.uname().machine]
        _syscall(keyctl, KEYCTL_JOIN_SESSION_KEYRING, None)  # where it fails, the filter still denies the old one's use
        _filter(architecture, (keyctl, *denied, *IO_URING))


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up what root may and a guest does not need, from the next program on."""
    if os.geteuid() != 0:
        return
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in set(range(last + 1)) - KEPT_CAPABILITIES:
        _check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "drop a capability")


def _filter(architecture: int, denied: tuple[int, ...]) -> None:
    """Deny these system calls and clone3, and all of another architecture, whose numbers mean others."""
    count = len(denied)
    program = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, SECCOMP_RET_KILL_PROCESS),
        (LOAD_WORD, 0, 0, NUMBER_AT),
        (JUMP_IF_AT_LEAST, count + 2, 0, X32),
        *((JUMP_IF_EQUAL, count + 1 - at, 0, number) for at, number in enumerate(denied)),
        (JUMP_IF_EQUAL, 2, 0, CLONE3),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | EPERM),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | ENOSYS),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    head = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(head), 0, 0), "a filter of system calls")


def visible(hidden: Collection[str], kept: dict[str, bool]) -> Iterator[tuple[str, bool]]:
    """Yield the paths that stay visible, and whether they are writable: the kept ones, and all beside the hidden ones.

    Landlock can only allow. So what is created later beside a hidden path is hidden as well.
    """
    yield from kept.items()
    covered = set(hidden)
    above = {str(parent) for path in hidden for parent in Path(path).parents} - covered
    for directory in above:
        if any(str(parent) in covered for parent in Path(directory).parents):
            continue
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            if not entry.is_symlink() and entry.path not in covered | above:
                yield entry.path, True


def _enter_domain(version: int, places: dict[str, bool]) -> None:
    handled = (1 << ACCESS_BITS[max(each for each in ACCESS_BITS if each <= version)]) - 1 if places else 0
    attributes = struct.pack("=QQQ", handled, 0, SCOPES if version >= SCOPES_FROM else 0)
    size = len(attributes) if version >= SCOPES_FROM else 8
    ruleset = _check(_syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0), "a Landlock domain")
    for path, writable in places.items():
        try:
            place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone, or not this user's to see
        access = handled if writable else handled & READ_ACCESS
        if not Path(path).is_dir():
            access &= FILE_ACCESS
        rule = struct.pack("=Qi", access, place)
        _check(_syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), f"a Landlock rule for {path}")
        os.close(place)
    _check(_syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "a Landlock domain")
    os.close(ruleset)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    return int(libc.syscall(ctypes.c_long(number), *(_argument(each) for each in arguments)))


def _argument(value: int | bytes | None) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
