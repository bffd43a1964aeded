/*
 * What a loader and a C library do for a position-independent program: there is neither here.
 *
 * The kernel puts the program at an address of its choice. Before any other code runs, its own
 * addresses are filled in, what needs no further change becomes read-only, and the stack protector
 * gets its value from the kernel. Nothing here may have a stack protector or use an address that is
 * stored in the program. A program that cannot be hardened ends.
 */

#include <elf.h>
#include <sys/mman.h>

enum { NOT_HARDENED = 50, STACK_SMASHED = 51 };

#if defined(__x86_64__)
enum { RELATIVE = R_X86_64_RELATIVE };
#else
enum { RELATIVE = R_AARCH64_RELATIVE };
#endif

/* Hidden: its address is computed, and not read from a table that is not filled in yet. */
extern const unsigned char __ehdr_start[] __attribute__((visibility("hidden")));
uintptr_t __stack_chk_guard;

/* A function's frame is overwritten. */
__attribute__((noreturn)) void __stack_chk_fail(void)
{
    leave(STACK_SMASHED);
}

__attribute__((no_stack_protector)) static void relocate(uintptr_t base, const Elf64_Dyn *entry)
{
    uintptr_t table = 0;
    size_t size = 0;
    for (; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_RELA)
            table = base + entry->d_un.d_ptr;
        if (entry->d_tag == DT_RELASZ)
            size = entry->d_un.d_val;
    }
    for (const Elf64_Rela *each = (void *)table; (uintptr_t)each < table + size; each++) {
        if (ELF64_R_TYPE(each->r_info) != RELATIVE)
            leave(NOT_HARDENED);
        *(uintptr_t *)(base + each->r_offset) = base + (uintptr_t)each->r_addend;
    }
}

__attribute__((no_stack_protector)) static void harden(const long *start)
{
    uintptr_t base = (uintptr_t)__ehdr_start, page = 0;
    const Elf64_Ehdr *head = (const void *)base;
    const Elf64_Phdr *segment = (const void *)(base + head->e_phoff), *relro = NULL;
    const unsigned char *chance = NULL;
    for (start += start[0] + 2; *start; start++) /* past the arguments: the environment */
        ;
    for (start++; start[0] != AT_NULL; start += 2) {
        if (start[0] == AT_PAGESZ)
            page = (uintptr_t)start[1];
        if (start[0] == AT_RANDOM)
            chance = (const void *)start[1];
    }
    for (int i = 0; i < head->e_phnum; i++) {
        if (segment[i].p_type == PT_DYNAMIC)
            relocate(base, (const void *)(base + segment[i].p_vaddr));
        if (segment[i].p_type == PT_GNU_RELRO)
            relro = segment + i;
    }
    if (!chance || !page || !relro)
        leave(NOT_HARDENED);
    /* The first byte is 0, so that no text can contain the value. */
    for (size_t i = 1; i < sizeof __stack_chk_guard; i++)
        ((unsigned char *)&__stack_chk_guard)[i] = chance[i];
    uintptr_t from = (base + relro->p_vaddr) & -page;
    uintptr_t to = (base + relro->p_vaddr + relro->p_memsz) & -page;
    if (call(SYS_mprotect, (long)from, (long)(to - from), PROT_READ, 0, 0) < 0)
        leave(NOT_HARDENED);
}
