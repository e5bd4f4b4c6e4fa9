# The disk of the EPT machine: a boot sector that reads the rest of the disk into memory and jumps into the kernel.
#
#   sector 0        boot sector, run by the BIOS at 0x7c00 in real mode
#   sector 1 ...    kernel (flat, with its .bss) │ boot data │ initramfs            → memory from 16 MiB on
#
# Reason against a common boot loader: Bochs executes some 20 million instructions per second, so that a loader's BIOS
# calls and copies and then the kernel's own decompression took 75 s, about half of it for unpacking a kernel that the
# host has already unpacked. This way Linux prints its first line after 20 s.
#
# The kernel is entered through its PVH entry point, in the state that Linux' arch/x86/platform/pvh/head.S asks for:
# 32-bit protected mode, flat segments, no paging, %ebx → struct hvm_start_info
# (include/xen/interface/hvm/start_info.h).
#
# Assembled once per run, with these symbols given:
#   KERNEL_ENTRY    physical address of the PVH entry point
#   RAM_BELOW_4G, RAM_ABOVE_4G     bytes of memory; the BIOS keeps its ACPI tables in the last 64 KiB below 4G
# and these files included: kernel.bin, command-line (text), initramfs.

        .set    KERNEL_BASE, 0x1000000          # where the kernel is linked to, physically
        .set    SECTOR, 512
        .set    SECTORS_AT_ONCE, 256            # the maximum of one ATA command; written as 0
        .set    ACPI_TABLES, 0x10000

        .text
        .code16
boot_sector:
        cli
        cld
        xorw    %ax, %ax
        movw    %ax, %ds
        inb     $0x92, %al                      # address line 20 on
        orb     $2, %al
        outb    %al, $0x92
        lgdtl   0x7c00 + gdt_register - boot_sector
        movl    %cr0, %eax
        orb     $1, %al
        movl    %eax, %cr0
        ljmpl   $8, $(0x7c00 + protected_mode - boot_sector)

        .code32
protected_mode:
        movw    $16, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        movl    $KERNEL_BASE, %edi
        movl    $1, %ebx                        # the next sector
read:                                           # ATA READ SECTORS by LBA28 from the first drive
        movw    $0x1f7, %dx
1:      inb     %dx, %al
        testb   $0x80, %al                      # busy
        jnz     1b
        movw    $0x1f2, %dx
        xorl    %eax, %eax
        outb    %al, %dx
        movl    %ebx, %eax
        incl    %edx
        outb    %al, %dx
        shrl    $8, %eax
        incl    %edx
        outb    %al, %dx
        shrl    $8, %eax
        incl    %edx
        outb    %al, %dx
        shrl    $8, %eax
        orb     $0xe0, %al
        incl    %edx
        outb    %al, %dx
        incl    %edx
        movb    $0x20, %al
        outb    %al, %dx
        movl    $SECTORS_AT_ONCE, %esi
2:      movw    $0x1f7, %dx
3:      inb     %dx, %al
        andb    $0x88, %al                      # busy, or data ready
        cmpb    $0x08, %al
        jne     3b
        movw    $0x1f0, %dx
        movl    $(SECTOR / 4), %ecx
        rep insl
        decl    %esi
        jnz     2b
        addl    $SECTORS_AT_ONCE, %ebx
        cmpl    $(KERNEL_BASE + payload_end - payload), %edi
        jb      read

        movl    $(KERNEL_BASE + start_info - payload), %ebx
        movl    $KERNEL_ENTRY, %ecx
        jmp     *%ecx

        .balign 8
gdt:    .quad   0
        .quad   0x00cf9a000000ffff              # 8: code, 32 bits, 0 to 4G
        .quad   0x00cf92000000ffff              # 16: data, the same
gdt_register:
        .word   gdt_register - gdt - 1
        .long   0x7c00 + gdt - boot_sector

        .org    SECTOR - 2
        .word   0xaa55

payload:
        .incbin "kernel.bin"
        .balign 16
start_info:
        .long   0x336ec578, 1, 0, 1             # magic, version, flags, modules
        .quad   KERNEL_BASE + module - payload
        .quad   KERNEL_BASE + command_line - payload
        .quad   0                               # the ACPI root: Linux searches for it
        .quad   KERNEL_BASE + memory_map - payload
        .long   4, 0                            # entries in the memory map
memory_map:                                     # address, size, type (1 RAM, 3 ACPI tables)
        .quad   0, 0x9f000, 1
        .quad   0x100000, RAM_BELOW_4G - ACPI_TABLES - 0x100000, 1
        .quad   RAM_BELOW_4G - ACPI_TABLES, ACPI_TABLES, 3
        .quad   0x100000000, RAM_ABOVE_4G, 1
module: .quad   KERNEL_BASE + initramfs - payload, initramfs_end - initramfs, 0, 0
command_line:
        .incbin "command-line"
        .byte   0

        .balign 4096
        .skip   SECTOR                          # fills the page in memory, which lacks the boot sector
initramfs:
        .incbin "initramfs"
initramfs_end:
        .balign SECTOR * SECTORS_AT_ONCE
        .skip   SECTOR
payload_end:
