/* What the files of the test kernel share. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

static inline void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" : : "a"(value), "d"(port)); }
static inline u8 in8(u16 port) { u8 value; __asm__ volatile("inb %1, %0" : "=a"(value) : "d"(port)); return value; }
static inline void out16(u16 port, u16 value) { __asm__ volatile("outw %0, %1" : : "a"(value), "d"(port)); }

/* kernel.c */
void print(const char *text);

/* interrupts.c: all of them are off, except in a wait. */
void set_up_interrupts(void);
void enable_interrupt(u8 pin);
void wait_for_interrupt(void);

/* virtio.c: a device with its virtqueues (Virtio 1.3 §2.7, §4.2). */
#define ENTRIES 4 /* of each queue */
#define WRITABLE 2
#define NEXT 1

struct queue {
    struct { u64 address; u32 length; u16 flags, next; } descriptors[ENTRIES];
    struct { u16 flags, index, heads[ENTRIES]; } available;
    struct { u16 flags, index; struct { u32 head, written; } chains[ENTRIES]; } used;
    u16 taken; /* chains of `used` that were taken */
} __attribute__((aligned(16)));

struct device {
    u64 window;
    u8 interrupt;
    struct queue queues[2];
};

int find_device(const char *command_line, u32 kind, struct device *device);
int start_device(struct device *device, u32 features, u32 queues);
u8 read_config(const struct device *device, u32 offset);
void describe(struct queue *queue, u16 descriptor, const void *bytes, u32 length, u16 flags);
void offer(struct device *device, u32 queue, u16 head);
u16 wait_for_used(struct device *device, u32 queue, u32 *written);

/* clients.c: uses the disk and the network interface of this command line, for ever. */
void use_devices(const char *command_line);
