/* Entered by PVH: 32-bit protected mode, paging off, start info in EBX.
   Maps the first 4 GiB one to one, goes to long mode and calls main(). */

    .section .note, "a", @note
    .balign 4
    .long 4, 8, 18              /* name size, value size, XEN_ELFNOTE_PHYS32_ENTRY */
    .asciz "Xen"
    .quad start

    .section .text.start, "ax"
    .code32
    .globl start
start:
    mov $stack_top, %esp
    mov %ebx, %ebp

    mov $level3, %eax
    or $3, %eax
    mov %eax, level4
    mov $level2, %eax
    or $3, %eax
    mov $level3, %edi
    mov $4, %ecx
1:  mov %eax, (%edi)
    add $0x1000, %eax
    add $8, %edi
    loop 1b
    mov $level2, %edi
    mov $0x83, %eax             /* present, writable, 2 MiB */
    mov $2048, %ecx
1:  mov %eax, (%edi)
    movl $0, 4(%edi)
    add $0x200000, %eax
    add $8, %edi
    dec %ecx
    jnz 1b

    mov $level4, %eax
    mov %eax, %cr3
    mov %cr4, %eax
    or $0x20, %eax              /* PAE */
    mov %eax, %cr4
    mov $0xc0000080, %ecx       /* EFER.LME */
    rdmsr
    or $0x100, %eax
    wrmsr
    mov %cr0, %eax
    or $0x80000000, %eax
    mov %eax, %cr0
    lgdt gdt_pointer
    ljmp $8, $long_mode

    .code64
long_mode:
    mov $16, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    mov %ebp, %edi
    call main
2:  cli
    hlt
    jmp 2b

    .globl triple_fault
triple_fault:
    lidt no_idt
    ud2

    .globl on_interrupt
on_interrupt:
    iretq

    .section .rodata
    .balign 8
gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
gdt_pointer:
    .word gdt_pointer - gdt - 1
    .long gdt
no_idt:
    .word 0
    .quad 0

    .section .bss
    .balign 4096
level4: .skip 4096
level3: .skip 4096
level2: .skip 4 * 4096
    .skip 8192
stack_top:
