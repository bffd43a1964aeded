#!/bin/sh
# Compiles the sandbox's process 1: guest/build.sh TARGET. It needs gcc and the kernel's headers.
set -eu
exec "${CC:-gcc}" -std=c11 -D_GNU_SOURCE -Os -Wall -Wextra -Werror -ffreestanding \
    -fno-stack-protector -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns \
    -fno-pie -no-pie -static -nostdlib -Wl,--build-id=none -Wl,-z,noexecstack -s \
    -o "$1" "$(dirname "$0")/init.c"
