"""Replaces itself with a command whose files stay unreadable to other users: `python exec_private.py COMMAND...`.

Tritonserver's shared memory contains prompts and answers, and the library that creates it sets the mode to 0644
regardless of the umask. Changing the mode afterwards would be too late: a process that has opened the file by then can
still read it. So a seccomp filter turns `fchmod` into a no-op in this process and its children, and the umask decides.
"""

import ctypes
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF opcodes
ARCHITECTURE, NUMBER = 4, 0  # offsets in struct seccomp_data
X86_64, FCHMOD = 0xC000003E, 91
ALLOW, DO_NOTHING = 0x7FFF0000, 0x00050000  # the latter returns 0
FILTER = (
    (LOAD, 0, 0, ARCHITECTURE),
    (JUMP_IF_EQUAL, 0, 3, X86_64),  # otherwise continue at ALLOW
    (LOAD, 0, 0, NUMBER),
    (JUMP_IF_EQUAL, 0, 1, FCHMOD),
    (RETURN, 0, 0, DO_NOTHING),
    (RETURN, 0, 0, ALLOW),
)


def main() -> None:
    """Install the filter, then execute the command."""
    os.umask(0o077)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in FILTER))
    program = struct.pack("HP", len(FILTER), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        why = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"other users of this machine may read the shared memory: no filter of system calls: {why}\n")
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
