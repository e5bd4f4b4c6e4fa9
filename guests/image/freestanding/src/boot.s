# All code outside ring 3, and the two entries.
#
# A host may emulate ring 0 instruction by instruction, and only the plain ones: this code is short and uses integer
# instructions only. All addresses are below 4 GiB and equal to physical ones.

.set VCPUS_MAX,         16
.set STACK_BYTES_LOG2,  16
.set KERNEL_CODE,       0x08
.set KERNEL_DATA,       0x10
.set USER_CODE,         0x1b
.set USER_DATA,         0x23
.set CODE_32,           0x28
.set TASK_FIRST,        0x30
.set TASK_BYTES_LOG2,   7
.set IST_BYTES_LOG2,    12

# The notes: wideleaf-protocol, elf_note.

.section .note.wideleaf, "a", @note
    .balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad pvh_start
    .balign 4
    .long 9, 16, 1
    .asciz "wideleaf"
    .balign 4
    .long 1, 0
    .quad direct_start

# Entry by PVH: 32-bit protected mode without paging, flat segments, EBX = physical address of the start info.

.section .boot, "ax"
.code32
.globl pvh_start
pvh_start:
    cli
    cld
    movl %ebx, start_info_gpa
    xorl %ebp, %ebp

# EBP = index of this vCPU. Long mode on the first tables, which map the first GiB.
enter_long_mode:
    lgdtl gdt_pointer
    movl $boot_pml4, %eax
    movl %eax, %cr3
    movl $0x620, %eax               # CR4: PAE, OSFXSR, OSXMMEXCPT
    movl %eax, %cr4
    # AVX, if CPUID has it and XSAVE: OSXSAVE in CR4, and its registers in XCR0. EBX, the start info, is stored.
    movl $1, %eax
    cpuid
    andl $0x14000000, %ecx
    cmpl $0x14000000, %ecx
    jne 1f
    movl $0x40620, %eax
    movl %eax, %cr4
    movl $7, %eax
    xorl %edx, %edx
    xorl %ecx, %ecx
    xsetbv
1:
    movl $0xc0000080, %ecx          # EFER
    rdmsr
    orl $0x100, %eax                # LME
    wrmsr
    movl $0x80010033, %eax          # CR0: PG, WP, NE, ET, MP, PE
    movl %eax, %cr0
    ljmpl $KERNEL_CODE, $long_mode

.code64
long_mode:
    movl $KERNEL_DATA, %eax
    movl %eax, %ss

    # This vCPU's task segment, for its interrupt stack: the descriptor scatters the address over its bits.
    movl %ebp, %edx
    shll $TASK_BYTES_LOG2, %edx
    addl $tasks, %edx
    movl %edx, %eax
    andl $0xffffff, %eax
    shlq $16, %rax
    shrl $24, %edx
    shlq $56, %rdx
    orq %rdx, %rax
    movabsq $0x0000890000000067, %rdx
    orq %rdx, %rax
    movl %ebp, %ecx
    shll $4, %ecx
    addl $TASK_FIRST, %ecx
    movq %rax, gdt(%rcx)
    ltr %cx

    # The first vCPU makes the gates: 32 exceptions, ring 0, interrupt stack 1.
    testl %ebp, %ebp
    jnz 2f
    movl $idt, %edi
    movl $exception_stubs, %edx
    movl $32, %ecx
1:  movl %edx, %eax
    andl $0xffff, %eax
    orl $(KERNEL_CODE << 16), %eax
    movl %eax, (%rdi)
    movl %edx, %eax
    andl $0xffff0000, %eax
    orl $0x8e01, %eax
    movl %eax, 4(%rdi)
    addl $16, %edx
    addl $16, %edi
    decl %ecx
    jnz 1b
2:  lidt idt_pointer

    # To ring 3, on this vCPU's stack. A gap for a missing return address keeps the stack aligned as after a call.
    movl %ebp, %eax
    incl %eax
    movl %eax, %edx
    shll $STACK_BYTES_LOG2, %eax
    addl $(stacks - 8), %eax
    shll $IST_BYTES_LOG2, %edx
    addl $interrupt_stacks, %edx
    movl %edx, %esp
    movl $pvh_main, %ecx
    testl %ebp, %ebp
    jz 3f
    movl $vcpu_main, %ecx
    movq vcpu_cr3, %rdx
    movq %rdx, %cr3
3:  movl $USER_DATA, %edx
    movl %edx, %ds
    movl %edx, %es
    movl %ebp, %edi
    pushq %rdx
    pushq %rax
    pushq $2                        # RFLAGS: interrupts off, IOPL 0
    pushq $USER_CODE
    pushq %rcx
    iretq

# Entry by our VMM: 64-bit ring 3. RDI = address of the boot data, RSI = index of this vCPU.

.globl direct_start
direct_start:
    cmpq $VCPUS_MAX, %rsi
    jae halt
    leaq 1(%rsi), %rax
    shlq $STACK_BYTES_LOG2, %rax
    leaq stacks(%rax), %rsp
    xorl %ebp, %ebp
    call direct_main
halt:
    pause
    jmp halt

# The system calls. `ud2` in ring 3 with EAX = one of these; EDX = port, RCX = value; the result is in EAX.
# The numbers are in machine.rs too. The compiler emits a `ud2` with another EAX for unreachable code.

invalid_opcode:
    testl $3, 8(%rsp)
    jz invalid_opcode_fatal
    cmpl $0x776c0000, %eax
    je call_out8
    cmpl $0x776c0001, %eax
    je call_out16
    cmpl $0x776c0002, %eax
    je call_in8
    cmpl $0x776c0003, %eax
    je call_load_cr3
invalid_opcode_fatal:
    pushq $0
    pushq $6
    jmp exception

call_out8:
    movl %ecx, %eax
    outb %al, %dx
    addq $2, (%rsp)
    iretq
call_out16:
    movl %ecx, %eax
    outw %ax, %dx
    addq $2, (%rsp)
    iretq
call_in8:
    xorl %eax, %eax
    inb %dx, %al
    addq $2, (%rsp)
    iretq
call_load_cr3:
    movq %rcx, %cr3
    addq $2, (%rsp)
    iretq

# Every other exception ends the program: record it and let ring 3 print it. A second one cannot be printed.

.balign 16
exception_stubs:
.set vector, 0
.rept 32
    .balign 16
    .if vector == 6
    jmp invalid_opcode
    .else
    # 8, 10 to 14, 17, 21, 29 and 30 have pushed an error code (SDM volume 3, table 6-1; APM volume 2, table 8-1).
    .if ((1 << vector) & 0x60227d00) == 0
    pushq $0
    .endif
    pushq $vector
    jmp exception
    .endif
    .set vector, vector + 1
.endr

exception:
    pushq %rax
    movl $1, %eax
    xchgl %eax, exception_is_noted
    testl %eax, %eax
    jnz exception_again
    popq %rax
    popq exception_vector
    popq exception_error
    popq exception_rip
    addq $16, %rsp                  # CS, RFLAGS
    popq exception_rsp
    movq %cr2, %rax
    movq %rax, exception_cr2
    subq $32, %rsp
    movq $exception_main, (%rsp)
    movq $USER_CODE, 8(%rsp)
    movq $2, 16(%rsp)
    movq $(exception_stack_end - 8), 24(%rsp)
    movq $USER_DATA, 32(%rsp)
    iretq
exception_again:
    movl $4, %eax                   # ExitCode::Exception
    movl $0xf4, %edx
    outb %al, %dx
    jmp halt

# Start of another vCPU: copied to its start page, in real mode, then as above.

.code16
.globl trampoline
trampoline:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl (trampoline_gdt_pointer - trampoline + 0x8000)
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $CODE_32, $trampoline_protected
trampoline_gdt_pointer:
    .word gdt_end - gdt - 1
    .long gdt
.globl trampoline_end
trampoline_end:

.code32
trampoline_protected:
    movl $KERNEL_DATA, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    cld
    # Take the index on offer. A vCPU that comes too late finds none and halts.
    xorl %ebp, %ebp
    xchgl %ebp, vcpu_index
    testl %ebp, %ebp
    jnz enter_long_mode
1:  pause
    jmp 1b
.code64

.section .data.boot, "aw"
    .balign 4096
boot_pml4:
    .quad boot_pdpt + 7             # present, writable, user
    .fill 511, 8, 0
boot_pdpt:
    .quad boot_pd + 7
    .fill 511, 8, 0
boot_pd:
.set page, 0
.rept 512
    .quad (page << 21) + 0xe7       # and accessed, dirty, 2 MiB
    .set page, page + 1
.endr

    .balign 16
gdt:
    .quad 0
    .quad 0x00af9b000000ffff        # 0x08 ring 0, 64-bit code
    .quad 0x00cf93000000ffff        # 0x10 ring 0, data
    .quad 0x00affb000000ffff        # 0x18 ring 3, 64-bit code
    .quad 0x00cff3000000ffff        # 0x20 ring 3, data
    .quad 0x00cf9b000000ffff        # 0x28 ring 0, 32-bit code
    .fill 2 * VCPUS_MAX, 8, 0       # 0x30 task segments
gdt_end:

    .balign 16
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
    .balign 16
idt_pointer:
    .word 32 * 16 - 1
    .quad idt

    .balign 128
tasks:
.set vcpu, 1
.rept VCPUS_MAX
    .fill 36, 1, 0
    .quad interrupt_stacks + (vcpu << IST_BYTES_LOG2)
    .fill 58, 1, 0
    .word 104                       # no I/O permissions
    .fill 24, 1, 0
    .set vcpu, vcpu + 1
.endr

.section .bss.boot, "aw", @nobits
    .balign 4096
stacks:
    .skip VCPUS_MAX << STACK_BYTES_LOG2
interrupt_stacks:
    .skip VCPUS_MAX << IST_BYTES_LOG2
    .skip 16384
exception_stack_end:
idt:
    .skip 32 * 16

.globl start_info_gpa, vcpu_cr3, vcpu_index
vcpu_cr3:           .skip 8
start_info_gpa:     .skip 4
vcpu_index:         .skip 4

.globl exception_vector, exception_error, exception_rip, exception_rsp, exception_cr2
exception_vector:   .skip 8
exception_error:    .skip 8
exception_rip:      .skip 8
exception_rsp:      .skip 8
exception_cr2:      .skip 8
exception_is_noted: .skip 4
.text
