/* Interrupts of devices: from a pin of the IOAPIC to vCPU 0, without the 8259s. */

#include "kernel.h"

#define PIC_MASKS 0x21 /* of the first; 0xa1 of the second */
#define IOAPIC ((volatile u32 *)0xfec00000)
#define IOAPIC_DATA 4 /* in words */
#define IOAPIC_PINS 0x10
#define LOCAL_APIC ((volatile u32 *)0xfee00000)
#define SPURIOUS (0xf0 / 4)
#define END_OF_INTERRUPT (0xb0 / 4)
#define APIC_ENABLED 0x100

#define DEVICE_VECTOR 0x20
#define SPURIOUS_VECTOR 0x2f

#define CODE_SEGMENT 8
#define PRESENT_INTERRUPT_GATE 0x8e00

void on_interrupt(void);

/* Vectors without a gate crash the VM. */
static struct { u16 low, segment, kind, middle; u32 high, reserved; } gates[SPURIOUS_VECTOR + 1];

static void set_gate(u8 vector)
{
    u64 handler = (u64)on_interrupt;
    gates[vector].low = handler;
    gates[vector].middle = handler >> 16;
    gates[vector].high = handler >> 32;
    gates[vector].segment = CODE_SEGMENT;
    gates[vector].kind = PRESENT_INTERRUPT_GATE;
}

void set_up_interrupts(void)
{
    struct { u16 limit; u64 base; } __attribute__((packed)) table = { sizeof gates - 1, (u64)gates };
    set_gate(DEVICE_VECTOR);
    set_gate(SPURIOUS_VECTOR);
    __asm__ volatile("lidt %0" : : "m"(table));
    /* The 8259s, which get the same interrupts, have no vectors. */
    out8(PIC_MASKS, 0xff);
    out8(PIC_MASKS + 0x80, 0xff);
    LOCAL_APIC[SPURIOUS] = APIC_ENABLED | SPURIOUS_VECTOR;
}

/* Edge, active high, to APIC 0. */
void enable_interrupt(u8 pin)
{
    *IOAPIC = IOAPIC_PINS + 2 * pin + 1;
    IOAPIC[IOAPIC_DATA] = 0;
    *IOAPIC = IOAPIC_PINS + 2 * pin;
    IOAPIC[IOAPIC_DATA] = DEVICE_VECTOR;
}

/* An interrupt that has come since interrupts were last on ends it, too. */
void wait_for_interrupt(void)
{
    __asm__ volatile("sti; hlt; cli" : : : "memory");
    LOCAL_APIC[END_OF_INTERRUPT] = 0;
}
