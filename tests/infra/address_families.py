"""Applies the rule `RestrictAddressFamilies=` of systemd without systemd: `socket` fails with EAFNOSUPPORT
for families that are not listed.

Usage: python address_families.py "AF_INET AF_UNIX" COMMAND...
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF instructions, each with code, jumps and value
# the number of the call `socket` on x86-64, and offsets in struct seccomp_data
_SOCKET, _NUMBER, _FIRST_ARGUMENT = 41, 0, 16
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(families: list[int]) -> None:
    """Restrict this process and its children permanently, with a seccomp filter."""
    count = len(families)
    lines = [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, count + 2, _SOCKET), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_EQUAL, count - i, 0, family) for i, family in enumerate(families)]
    lines += [(_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    text = b"".join(struct.pack("HBBI", *line) for line in lines)
    program = _Program(len(lines), ctypes.cast(ctypes.create_string_buffer(text, len(text)), ctypes.c_char_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    restrict([getattr(socket, name) for name in sys.argv[1].split()])
    os.execvp(sys.argv[2], sys.argv[2:])
