#!/bin/sh
# Compiles the sandbox's process 1: guest/build.sh TARGET. It needs gcc and the kernel's headers.
# _FORTIFY_SOURCE is not defined: it checks calls of a C library, and there is none.
set -eu
exec "${CC:-gcc}" -std=c11 -D_GNU_SOURCE -Os -Wall -Wextra -Werror -ffreestanding \
    -fstack-protector-strong -mstack-protector-guard=global -fvisibility=hidden \
    -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns \
    -fPIE -static-pie -nostdlib -Wl,--build-id=none -Wl,-z,relro,-z,now,-z,noexecstack -s \
    -o "$1" "$(dirname "$0")/init.c"
