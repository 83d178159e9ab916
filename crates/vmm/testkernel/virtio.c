/* A driver's side of virtio-mmio: registers, features and split virtqueues. */

#include "kernel.h"

#define PARAMETER "virtio_mmio.device=4K@"

#define MAGIC 0x000
#define VERSION 0x004
#define KIND 0x008
#define FEATURES_WANTED 0x020
#define FEATURES_WANTED_WORD 0x024
#define QUEUE 0x030
#define QUEUE_SIZE_MAX 0x034
#define QUEUE_SIZE 0x038
#define QUEUE_READY 0x044
#define NOTIFY 0x050
#define INTERRUPT_STATUS 0x060
#define INTERRUPT_ACKNOWLEDGE 0x064
#define STATUS 0x070
#define QUEUE_DESCRIPTORS 0x080
#define QUEUE_AVAILABLE 0x090
#define QUEUE_USED 0x0a0
#define CONFIG 0x100

#define ACKNOWLEDGE 1
#define DRIVER 2
#define DRIVER_OK 4
#define FEATURES_OK 8

#define MAGIC_VALUE 0x74726976
#define FEATURE_VERSION_1 1 /* in the second word */

static u32 read(const struct device *device, u32 offset)
{
    return *(volatile u32 *)(device->window + offset);
}

static void write(const struct device *device, u32 offset, u32 value)
{
    *(volatile u32 *)(device->window + offset) = value;
}

static void write_address(const struct device *device, u32 offset, const void *address)
{
    write(device, offset, (u32)(u64)address);
    write(device, offset + 4, (u64)address >> 32);
}

/* A number at `*text`, hexadecimal after 0x. */
static u64 number(const char **text)
{
    u64 value = 0, base = 10;
    if ((*text)[0] == '0' && (*text)[1] == 'x')
        base = 16, *text += 2;
    for (;; ++*text) {
        u8 digit = **text > '9' ? **text - 'a' + 10 : **text - '0';
        if (digit >= base)
            return value;
        value = value * base + digit;
    }
}

/* Moves `*text` behind `expected`, if it is there. */
static int skip(const char **text, const char *expected)
{
    const char *at = *text;
    while (*expected)
        if (*at++ != *expected++)
            return 0;
    *text = at;
    return 1;
}

/* The first device of this kind on a command line. */
int find_device(const char *command_line, u32 kind, struct device *device)
{
    while (*command_line) {
        if (!skip(&command_line, PARAMETER)) {
            command_line++;
            continue;
        }
        device->window = number(&command_line);
        device->interrupt = skip(&command_line, ":") ? number(&command_line) : 0;
        if (read(device, MAGIC) == MAGIC_VALUE && read(device, VERSION) == 2 && read(device, KIND) == kind)
            return 1;
    }
    return 0;
}

static void set_up_queue(struct device *device, u32 number)
{
    struct queue *queue = &device->queues[number];
    write(device, QUEUE, number);
    write(device, QUEUE_SIZE, ENTRIES);
    write_address(device, QUEUE_DESCRIPTORS, queue->descriptors);
    write_address(device, QUEUE_AVAILABLE, &queue->available);
    write_address(device, QUEUE_USED, &queue->used);
    write(device, QUEUE_READY, 1);
}

/* Negotiates exactly these features of the first word; fails if the device does not agree. */
int start_device(struct device *device, u32 features, u32 queues)
{
    u32 status = ACKNOWLEDGE | DRIVER;
    write(device, STATUS, 0);
    write(device, STATUS, ACKNOWLEDGE);
    write(device, STATUS, status);
    write(device, FEATURES_WANTED_WORD, 0);
    write(device, FEATURES_WANTED, features);
    write(device, FEATURES_WANTED_WORD, 1);
    write(device, FEATURES_WANTED, FEATURE_VERSION_1);
    write(device, STATUS, status |= FEATURES_OK);
    if (read(device, STATUS) != status)
        return 0;
    for (u32 number = 0; number < queues; number++) {
        set_up_queue(device, number);
        if (!read(device, QUEUE_READY))
            return 0;
    }
    enable_interrupt(device->interrupt);
    write(device, STATUS, status |= DRIVER_OK);
    return read(device, STATUS) == status;
}

u8 read_config(const struct device *device, u32 offset)
{
    return *(volatile u8 *)(device->window + CONFIG + offset);
}

/* With NEXT in `flags`, the following descriptor continues the chain. */
void describe(struct queue *queue, u16 descriptor, const void *bytes, u32 length, u16 flags)
{
    queue->descriptors[descriptor].address = (u64)bytes;
    queue->descriptors[descriptor].length = length;
    queue->descriptors[descriptor].flags = flags;
    queue->descriptors[descriptor].next = descriptor + 1;
}

/* Gives the device the chain that begins at descriptor `head`. */
void offer(struct device *device, u32 number, u16 head)
{
    struct queue *queue = &device->queues[number];
    u16 index = queue->available.index;
    queue->available.heads[index % ENTRIES] = head;
    /* x86 stores in order, if the compiler does. */
    __atomic_store_n(&queue->available.index, index + 1, __ATOMIC_RELEASE);
    write(device, NOTIFY, number);
}

/* Takes a chain that the device has used: its head, and the bytes that were written to it. */
u16 wait_for_used(struct device *device, u32 number, u32 *written)
{
    struct queue *queue = &device->queues[number];
    u16 taken = queue->taken;
    while (__atomic_load_n(&queue->used.index, __ATOMIC_ACQUIRE) == taken) {
        wait_for_interrupt();
        write(device, INTERRUPT_ACKNOWLEDGE, read(device, INTERRUPT_STATUS));
    }
    queue->taken = taken + 1;
    *written = queue->used.chains[taken % ENTRIES].written;
    return queue->used.chains[taken % ENTRIES].head;
}
