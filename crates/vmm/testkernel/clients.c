/* Clients of a virtio disk (Virtio 1.3 §5.2) and network interface (§5.1). The guest is 10.0.0.2
   and answers ARP and ICMP echo requests. For the echo request of sequence number n it reads
   sector n, and copies it to sector n + 1 if it has the pattern that tests give it. */

#include "kernel.h"

#define NETWORK 1
#define DISK 2

#define SECTOR 512
#define READ 0
#define WRITE 1

#define FEATURE_MAC (1 << 5)
#define RECEIVE 0
#define TRANSMIT 1
#define HEADER 12
#define BUFFER 2048

static struct device disk, network;
static u8 buffers[ENTRIES][BUFFER];
static const u8 own_address[4] = { 10, 0, 0, 2 };

static void copy(u8 *to, const u8 *from, u32 count)
{
    while (count--)
        *to++ = *from++;
}

static int equal(const u8 *one, const u8 *other, u32 count)
{
    while (count && *one == *other)
        one++, other++, count--;
    return !count;
}

static u16 big_endian(const u8 *bytes) { return bytes[0] << 8 | bytes[1]; }

/* Whether the disk has read or written a sector. */
static int transfer(u32 type, u64 sector, u8 *bytes)
{
    struct { u32 type, reserved; u64 sector; } request = { type, 0, sector };
    u8 status = 0xff;
    u32 written;
    describe(disk.queues, 0, &request, sizeof request, NEXT);
    describe(disk.queues, 1, bytes, SECTOR, type == READ ? NEXT | WRITABLE : NEXT);
    describe(disk.queues, 2, &status, 1, WRITABLE);
    offer(&disk, 0, 0);
    wait_for_used(&disk, 0, &written);
    return status == 0;
}

static int check_disk(u16 sector)
{
    static u8 bytes[SECTOR];
    int right = transfer(READ, sector, bytes);
    for (u32 at = 0; at < SECTOR; at++)
        right &= bytes[at] == (u8)(sector + at);
    return right && transfer(WRITE, sector + 1, bytes);
}

/* Of this moment: a restored guest may have another one. */
static void copy_own_mac(u8 *to)
{
    for (u32 at = 0; at < 6; at++)
        to[at] = read_config(&network, at);
}

/* Makes an answer of an ARP request. */
static int answer_arp(u8 *packet)
{
    static const u8 request[8] = { 0, 1, 8, 0, 6, 4, 0, 1 };
    u8 *sender = packet + 8, *target = packet + 18;
    if (!equal(packet, request, 8) || !equal(target + 6, own_address, 4))
        return 0;
    packet[7] = 2;
    copy(target, sender, 10);
    copy_own_mac(sender);
    copy(sender + 6, own_address, 4);
    return 1;
}

/* Makes an answer of an ICMP echo request. */
static int answer_ping(u8 *packet)
{
    u8 *icmp = packet + 4 * (packet[0] & 15), *source = packet + 12, *destination = packet + 16;
    u32 sum;
    if (packet[9] != 1 || !equal(destination, own_address, 4) || icmp[0] != 8)
        return 0;
    if (!check_disk(big_endian(icmp + 6))) {
        print("the disk failed\n");
        return 0;
    }
    /* Only type and code change the sum, from 0x0800 to 0; the checksum is its complement. */
    copy(destination, source, 4);
    copy(source, own_address, 4);
    icmp[0] = 0;
    sum = big_endian(icmp + 2) + 0x800;
    sum += sum >> 16;
    icmp[2] = sum >> 8;
    icmp[3] = sum;
    return 1;
}

static int answer(u8 *frame)
{
    u8 *source = frame + 6, *packet = frame + 14;
    u16 type = big_endian(frame + 12);
    if (type == 0x806 ? !answer_arp(packet) : type != 0x800 || !answer_ping(packet))
        return 0;
    copy(frame, source, 6);
    copy_own_mac(source);
    return 1;
}

static void offer_buffer(u16 number)
{
    describe(&network.queues[RECEIVE], number, buffers[number], BUFFER, WRITABLE);
    offer(&network, RECEIVE, number);
}

static void serve_network(void)
{
    for (u16 number = 0; number < ENTRIES; number++)
        offer_buffer(number);
    for (;;) {
        u32 length, none;
        u16 number = wait_for_used(&network, RECEIVE, &length);
        u8 *buffer = buffers[number];
        if (answer(buffer + HEADER)) {
            for (u32 at = 0; at < HEADER; at++)
                buffer[at] = 0;
            describe(&network.queues[TRANSMIT], 0, buffer, length, 0);
            offer(&network, TRANSMIT, 0);
            wait_for_used(&network, TRANSMIT, &none);
        }
        offer_buffer(number);
    }
}

void use_devices(const char *command_line)
{
    set_up_interrupts();
    if (!find_device(command_line, DISK, &disk) || !find_device(command_line, NETWORK, &network))
        print("a device is missing\n");
    else if (!start_device(&disk, 0, 1) || !start_device(&network, FEATURE_MAC, 2))
        print("a device did not start\n");
    else
        serve_network();
}
