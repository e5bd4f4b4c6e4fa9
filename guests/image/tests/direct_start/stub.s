# Plays our VMM for the test of the direct entry. It brings every vCPU from the PVH entry into the state of
# wideleaf-protocol's `direct`, without an IDT, and jumps to the image. The test has written the boot data and the
# entry to the addresses below.

.set BOOT_DATA,     0x900000
.set ENTRY64,       0x900800        # u64, written by the test

.section .note.pvh, "a", @note
    .balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad start

.text
.code32
.globl start
start:
    cli
    cld
    # The others, all at once: real-mode code at 0x8000, INIT, a pause, start-up (local APIC, interrupt command).
    movl $trampoline, %esi
    movl $0x8000, %edi
    movl $(trampoline_end - trampoline), %ecx
    rep movsb
    movl $0xc4500, 0xfee00300
    movl $1000000, %ecx
1:  pause
    decl %ecx
    jnz 1b
    movl $0xc4608, 0xfee00300
    xorl %ebp, %ebp

# EBP = index of this vCPU.
enter:
    lgdtl gdt_pointer
    movl $pml4, %eax
    movl %eax, %cr3
    movl $0x620, %eax
    movl %eax, %cr4
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl $0x80010033, %eax
    movl %eax, %cr0
    ljmpl $0x08, $long_mode
.code64
long_mode:
    movl $0x10, %eax
    movl %eax, %ss
    movl %ebp, %esp
    shll $7, %esp
    addl $stacks + 128, %esp
    movl $0x23, %eax
    movl %eax, %ds
    movl %eax, %es
    movl $BOOT_DATA, %edi
    movl %ebp, %esi
    pushq $0x23
    pushq $0                        # the image brings its own stack
    pushq $0x3002                   # IOPL 3, interrupts off
    pushq $0x1b
    pushq ENTRY64
    lidt no_idt
    iretq

.code16
trampoline:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl (trampoline_gdt_pointer - trampoline + 0x8000)
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $0x28, $another
trampoline_gdt_pointer:
    .word 6 * 8 - 1
    .long gdt
trampoline_end:
.code32
another:
    movl $0x10, %eax
    movl %eax, %ds
    movl $1, %ebp
    lock xaddl %ebp, next_index
    jmp enter

.data
next_index:
    .long 1
    .balign 4096
pml4:
    .quad pdpt + 7
    .fill 511, 8, 0
pdpt:
    .quad pd + 7
    .fill 511, 8, 0
pd:
.set page, 0
.rept 512
    .quad (page << 21) + 0x87
    .set page, page + 1
.endr
stacks:
    .fill 16 * 128, 1, 0
gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00affb000000ffff
    .quad 0x00cff3000000ffff
    .quad 0x00cf9b000000ffff
gdt_pointer:
    .word 6 * 8 - 1
    .quad gdt
no_idt:
    .word 0
    .quad 0
